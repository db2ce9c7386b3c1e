"""From a list of linears to cubins and a manifest: ``python -m ringfp4.build_cubins``.

``shapes`` reads what to build, ``job`` names each compile, ``worker`` compiles one kernel in a
process of its own, ``elf``/``sass``/``ptx`` read what came out, ``checks`` refuses what must not
ship, ``manifest`` writes the folder that ``ringfp4.runtime.load(path=...)`` reads.
"""
