"""Measuring: the loss of every token of whole documents, and the numbers made of it (SPEC section 11).

for piece in score(model, documents, lanes=8, chunk=512, edit=None): ...    losses as they come, in any order
result = evaluate_split(model, corpus, "test", ...)                         measures, per document and in all
"""
