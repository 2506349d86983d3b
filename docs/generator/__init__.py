"""The methods' documentation: docs/methods.md and a page per recipe, made from the code.

``make docs`` writes them. A new method needs no line here: its page comes from conf/strategy/x.yaml
(name, paper, options), strategies/x.py (the docstring), one round of it (payloads, state, cost),
the tests that name it, and, where there is one, fedhet/methods/notes/x.md.
"""
