"""Where the time of a step goes.

profile.py         runs some steps under torch's profiler
profile_summary.py a profile as seconds of compute, communication and idle time
trace.py           records when each pipeline action of a step began and ended
chrome.py          converts timelines to Chrome traces and back
"""
