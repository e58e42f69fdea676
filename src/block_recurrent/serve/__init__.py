"""`brt serve`: models over HTTP, with memories as named values. See docs/serving.md.

app.py          the application: access, one-line errors, health, metrics, the web page
completions.py  /v1/models and /v1/completions, as OpenAI's clients expect them
memories.py     /v1/memories
scoring.py      /v1/score
store.py        memories on disk: names, trails, prefixes
reading.py      reading text, in calls that end at fixed positions
scheduler.py    one thread per model: all generations share a decode call, reads take turns in between
"""
