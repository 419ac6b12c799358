"""Problems whose optimum is known exactly, and the proof that each algorithm finds it: `uniml-rl selftest`."""
