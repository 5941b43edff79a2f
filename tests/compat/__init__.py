"""Programs of other people on Kedge: ``python -m tests.compat``, or ``make test-compat``."""
