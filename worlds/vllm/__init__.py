"""The context stage on vLLM: the same checkpoint and the same tokens, another engine.

::

    stage.py --token ids--> engine.py (AsyncLLM, in a thread) --> [ vLLM's engine process: model.py, writing.py ]
             <--tokens, hidden states-- kv_transfer_params ------- connector.py <--'

``history.py`` is what a session keeps. ``model.py``, ``writing.py`` and ``connector.py`` run in vLLM's process.
"""
