"""What is shown and kept of a run: metrics file, TensorBoard, the live line."""
