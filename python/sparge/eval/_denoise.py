"""denoisers: relative error of the final latents"""
def add_arguments(parser): pass
def run(options): raise NotImplementedError
