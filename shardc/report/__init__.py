"""What `shardc inspect` shows: pure functions from a Program to text, tables, JSON or one HTML file."""

from shardc.report.comm import Row, comm_rows, comm_table
from shardc.report.coverage import Coverage, coverage
from shardc.report.html_page import html
from shardc.report.text import before, to_json

__all__ = ["Coverage", "Row", "before", "comm_rows", "comm_table", "coverage", "html", "to_json"]
