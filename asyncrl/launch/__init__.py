"""The run: places processes with Ray, supervises them, stops them in order."""
