"""Analysis of the log of a finished or running run.  Imports only the standard library."""

from kedge.insight.doctor import examine
from kedge.insight.log import Finding, RunLog, read_log

__all__ = ["Finding", "RunLog", "examine", "read_log"]
