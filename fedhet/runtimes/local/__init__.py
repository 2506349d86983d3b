"""The local engine: the same ServerApp and ClientApp as `flwr run`, without a SuperLink.

A :class:`WorkerGrid` implements Flower's ``Grid`` over warm workers:
forked processes (runtime=local) or Ray actors (runtime=ray).
"""
