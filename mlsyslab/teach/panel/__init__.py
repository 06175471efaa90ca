"""What the live panel of `mlsyslab.teach.explore` is made of."""
