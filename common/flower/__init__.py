"""Everything that leans on Flower's inside: one file an issue.

The rest of fedhet imports only what Flower documents for apps (`flwr.app`, `flwr.clientapp`,
`flwr.serverapp`, `flwr.client`, `flwr.common`, `flwr.simulation`); `tests/test_imports.py` checks
that. Each file here says what of Flower it uses or mends, for which releases, and which test
fails when it is not needed any more.
"""
