"""Draws the timeline of a pipeline: `python -m tools.timeline --schedule NAME --stages P
--micro-batches M`.

__main__.py  the command
panels.py    makes timelines of simulated schedules and of a measured step; prints them as text
draw.py      draws timelines as a picture
"""
