"""fedhet-report: from results directories to tables, curves and one page.

``sources`` and ``run_data`` read runs, ``data_file`` keeps them in one file, ``layout`` and
``published_tables`` put them into rows and columns, ``statistics`` has the numbers, ``page`` puts
the parts together, ``render`` writes them. ``paper_figures`` finds what a package of
``reproductions/`` adds for its paper.
"""
