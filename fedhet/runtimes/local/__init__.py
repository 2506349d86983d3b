"""The local runtimes: the same ServerApp and ClientApp as `flwr run`, without a SuperLink.

:class:`WorkerGrid` implements Flower's ``Grid`` over warm workers: forked processes (runtime=local)
or Ray actors (runtime=ray).
"""
