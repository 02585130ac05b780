"""What each rank of a pipeline does when, drawn: `python -m tools.timeline --schedule NAME --stages
P --micro-batches M`.

__main__.py  the command
panels.py    what is shown: schedules simulated, a step measured
text.py      as text
draw.py      as a picture
"""
