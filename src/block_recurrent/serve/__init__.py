"""`brt serve`: models behind HTTP, with memories as named values. docs/serving.md says how it is used.

app.py          the application: who may ask, errors as one sentence, health, metrics, the page
completions.py  /v1/models and /v1/completions, as OpenAI's clients expect them
memories.py     /v1/memories
scoring.py      /v1/score
store.py        memories on disk: names, trails, prefixes
reading.py      text through the model, in calls that end at fixed places
scheduler.py    one thread per model: all writers share a decode call, readers take turns between
"""
