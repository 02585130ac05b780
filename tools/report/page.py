"""One self-contained HTML page about a run, from what run.py has read and the template page.html.

The template escapes what a run's files contain. The page's Content-Security-Policy forbids the
browser to run any script, and to load anything.
"""

import time
from pathlib import Path

from tools.report import tables
from tools.report.charts import BINS, NARROW, WIDE, charts, draw
from tools.report.run import Run
from tools.timeline.draw import Panel, inline
from tools.timeline.draw import draw as draw_timeline
from tools.timeline.panels import figures


def page(run: Run) -> str:
    """The whole HTML document."""
    import jinja2

    drawn = []
    for chart in charts(run):
        figure = draw(chart, WIDE if chart.is_wide else NARROW, run.stages)
        drawn.append((chart, inline(figure)))
    timelines = []
    for name, timeline in run.timelines[:1]:
        figure = draw_timeline([Panel("One step", timeline, figures(timeline, " ms"))], "ms")
        timelines.append((name, inline(figure)))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html").render(
        run=run,
        tables=tables,
        charts=drawn,
        timelines=timelines,
        is_thinned=len(run.records) > BINS,
        now=tables.clock(time.time()),
    )
