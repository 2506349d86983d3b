"""The documentation generator: docs/methods.md, docs/methods/, docs/experiments.md, docs/keys.md.

``make docs`` writes them. A method's page comes from conf/strategy/x.yaml (name, paper, options),
strategies/x.py (its docstring), two rounds of it (bytes sent and kept) and, where there is one,
docs/generator/notes/x.md. A new method needs no line here. docs/keys.md, docs/recipe.schema.json
and the comments behind the keys of conf/config.yaml, local, partition and runtime come from
conf/schema.
"""
