"""fedhet-report: from results directories to tables, curves and one page.

`runs` reads what runs have written, `data` keeps it in one small file, `layout` puts runs into rows
and columns, `measures` has the numbers, `tables`, `curves`, `agreement`, `class_counts`,
`class_relations`, `weight_norms` and `surroundings` make the parts of the page, `page` their order,
and `markdown` and `html` write it down.
"""
