import argparse, time, json
from collections import Counter
from tests.simulation.running import simulate, simulate_many
p = argparse.ArgumentParser(); p.add_argument("--seed", type=int); p.add_argument("--seeds", type=int, default=100); p.add_argument("--first", type=int, default=0); p.add_argument("-v", action="store_true"); p.add_argument("-j", type=int, default=1)

def main():
    a = p.parse_args()
    if a.seed is not None:
        r = simulate(a.seed)
        if a.v:
            for t, k, w in r.tail: print(f"{t:9.3f} {k:40s} {w}")
        for v in r.violations: print(v)
        print(r.digest, r.num_messages, r.num_tokens)
        return
    t = time.process_time(); w = time.time()
    n = Counter(); bad=0; msgs=0
    for r in simulate_many(range(a.first, a.first+a.seeds), a.j):
        msgs += r.num_messages
        if r.violations:
            bad += 1
            n[r.violations[0].invariant]+=1
            print(r.seed, str(r.violations[0])[:250])
    print(bad, n, "cpu", time.process_time()-t, "wall", time.time()-w, "msgs/run", msgs/a.seeds)
if __name__ == "__main__":
    main()
