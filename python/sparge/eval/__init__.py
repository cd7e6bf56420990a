"""python -m sparge.eval: what sparse attention changes in a model, and what it saves. Dense and sparse side by side."""
