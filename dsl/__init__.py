"""CuTe DSL device code. Kernel modules import the DSL; ``ringfp4.dsl.config`` does not."""
