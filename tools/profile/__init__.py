"""Shows where the time of profiled steps went: `python -m tools.profile RUN`.

__main__.py  the command
summary.py   a trace as seconds of compute, communication by axis and idle time
"""
