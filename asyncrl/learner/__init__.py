"""The pool that trains: engines, batching, dispatch, worker, ranks, checkpoints. Import its modules by name; they load torch."""
