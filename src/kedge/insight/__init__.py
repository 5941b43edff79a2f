"""What a finished or running run says of itself, read from its log.  Standard library alone."""

from kedge.insight.doctor import Finding, examine
from kedge.insight.log import RunLog, read_log

__all__ = ["Finding", "RunLog", "examine", "read_log"]
