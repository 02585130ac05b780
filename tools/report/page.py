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

    # each: title, what is beside it, the legend, whether it has a row of its own, the picture
    pictures = []
    for chart in charts(run):
        beside = ", ".join(filter(None, (chart.unit, chart.scale)))
        figure = draw(chart, WIDE if chart.is_wide else NARROW, run.data_stages)
        pictures.append((chart.title, beside, chart.legend, chart.is_wide, inline(figure)))
    if run.timeline is not None:
        name, timeline = run.timeline
        figure = draw_timeline([Panel("One step", timeline, figures(timeline, " ms"))], "ms")
        pictures.append(("Pipeline timeline", name, [], True, inline(figure)))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html").render(
        run=run,
        tables=tables,
        pictures=pictures,
        is_thinned=len(run.records) > BINS,
        now=tables.clock(time.time()),
    )
