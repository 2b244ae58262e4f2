"""The conformance suite: what every engine must agree with, to the precision of the dtype, before it may train.

A *cell* is one layout of one engine. Each cell trains three steps and is compared with one plain float32 process that was written
here. ``cells.py`` lists them, ``adapters.py`` says the little that differs between engines, ``work.py`` is what a rank does,
``ranks.py`` keeps the ranks, ``reference.py`` is the plain process, ``checks.py`` compares, ``page.py`` writes docs/engines.md.
"""
