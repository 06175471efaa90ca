"""The edge: live panel, exercise checks. Needs the notebooks extra."""
