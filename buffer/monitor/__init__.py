"""Watches a run: alarms, and one page with the metrics of every part."""
