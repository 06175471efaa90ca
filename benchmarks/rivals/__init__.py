"""Other model servers with the lab's model behind them, for `benchmarks/serving.py`: one short script each.

All take the body that the lab's load generator sends and answer in its form, so that one generator drives them all.
"""
