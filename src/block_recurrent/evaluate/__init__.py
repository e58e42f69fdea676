"""Evaluation: the loss of every token of whole documents, and the metrics computed from it.

for piece in score(model, documents, lanes=8, chunk=512, edit=None): ...    losses in pieces, in any order of documents
result = evaluate_split(model, corpus, "test", ...)                         metrics, per document and in total
"""
