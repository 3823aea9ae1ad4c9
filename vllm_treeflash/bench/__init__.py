"""``vllm-treeflash bench``: plain vLLM against chains and trees, paired in one run.

``cli`` reads the options and drives the run, ``configurations`` says what is compared,
``engine`` runs one batch on one vLLM engine, ``worker`` times the steps inside that engine,
``measure`` turns the records into figures and ``table`` prints them.
"""
