"""What training sees: a text or a mixture, cut into what is trained on and what is held out. No torch.

corpus.py          what is asked of it
opened_text.py     a text, opened: its tokens, its hash, its files
held_out_text.py   a text that is held out as a whole
text_corpus.py     a text, cut into what is trained on and what is held out
mixture_corpus.py  a mixture, opened
of_phases.py       what each phase of a run reads
fingerprint.py     what identifies it, and what has changed of it
"""
