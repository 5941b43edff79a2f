import sys,torch,time
from kedge.testing import tiny_policy
from kedge.backends.vllm import *
from tests.contract.test_rollout_engine import prompts, STOP
from kedge.types import Sampling
def weights(m): return {n:p.detach().clone() for n,p in m.named_parameters()}
for fam,kw in (("llama",{}),("gpt2",{}),("gpt_neox",{}),("qwen2",{"tie_word_embeddings":True})):
    m=tiny_policy(fam,initializer_range=0.3 if fam=="llama" else 0.1,heads=1,**kw)
    t=time.time()
    bp=Blueprint.of(m); e=VLLMEngine(InProcess(bp,weights(m)),bp,pad_id=0)
    print(fam,"start",time.time()-t,bp.tied)
    r=e.generate(prompts(),sampling=Sampling(max_new_tokens=10,stop_ids=STOP,min_new_tokens=2,temperature=0.7),seed=0)
    print(r.ids.tolist()[0],r.version.tolist(),r.finished.tolist())
    print(e.load_weights(weights(m),1),e.sync_gap)
    with torch.no_grad():
        for p in m.parameters(): p.add_(1e-4*torch.randn_like(p))
    t=time.time(); print(e.load_weights(weights(m),2),e.sync_gap,time.time()-t)
    from kedge.backends.hf.rollout import EmbeddedEngine
    e.close()
