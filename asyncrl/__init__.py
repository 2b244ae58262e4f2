"""asyncrl: asynchronous off-policy reinforcement learning for language models, with a versioned replay queue.

Importing this package loads neither torch, ray, vllm nor zmq; a test holds it to that.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
