"""What of the documentation is made of schema, recipes and code.

``python -m docs.generator`` writes conf/catalogue.json (what the classes of methods and options
say), docs/recipe.schema.json and the comments behind the keys of conf/. ``mkdocs build`` (``make
docs``) calls site.py, which makes the pages of methods, keys, experiments and the library. A
method's page comes from its class (name, paper, what it is for, keys), notes/x.md (equations, when
to use it), strategies/x.py (docstring), costs.json (what travels: ``python -m
docs.generator.measure``), docs/results/methods.json and benchmarks/comparison.json.
"""
