"""One document on a checkpoint that can be sent to a colleague: HTML, JSON and Markdown with the same content.

::

    from omniw4 import report

    document = report.collect("out", {"": "verify.json", "rtn": "rtn.json"})
    report.write(document, "out/report")      # report.html, report.json, report.md
"""

from omniw4.report.collect import collect
from omniw4.report.write import write

__all__ = ["collect", "write"]
