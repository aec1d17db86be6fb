"""Text <-> token ids. The only package below the server that deals with characters.

    text ── encode ──► ids ── engine ──► ids ── Detokenizer ──► text that is safe to show
      ▲
      └── ChatTemplate ── messages, tools

    tokenizer.py        Tokenizer: encode, decode, the bytes of each id
    directory_vocab.py  a Tokenizer's parts from the files of a model directory
    gguf_vocab.py       the same parts from the header of a GGUF file
    vocabulary.py       the type of these parts, and how text is split into words
    special_text.py     finds the spellings of special tokens in a text
    detokenizer.py      ids that arrive one by one -> text, whole characters only, up to a stop string
    chat_families.py    the table of templates and their models
    chat_template.py    a conversation -> the text and ids its model was trained on
    sandbox.py          limits on the time and memory of a template

It receives paths and plain mappings, imports no PyTorch and does not depend on the engine.
"""
