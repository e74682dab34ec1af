// Checks recorded histories of a store for linearizability: could one record per key, which does one operation after the other, each
// at the store time that was told, have given these answers? Exit 0: yes; 1: no; 2: not decided, or the history cannot be read.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

func main() {
	perKey := flag.Duration("timeout", 60*time.Second, "for one key")
	overtaking := flag.Bool("overtaking", false, "a batch may overtake another one of the same client")
	snapshots := flag.Bool("snapshots", false, "operations that overlap may take effect in another order than that of their store times")
	seenEarly := flag.Bool("seen-early", false, "what was seen shortly before an outage may have been undone by it")
	quiet := flag.Bool("quiet", false, "do not explain what is not linearizable")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: checker [-timeout 60s] [-overtaking] [-snapshots] [-seen-early] [-quiet] HISTORY")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	os.Exit(judge(flag.Arg(0), *perKey, *overtaking, *snapshots, *seenEarly, *quiet))
}

func judge(path string, timeout time.Duration, overtaking, snapshots, seenEarly, quiet bool) int {
	operations, outages, err := readHistory(path)
	if err != nil {
		fmt.Fprintf(os.Stderr, "checker: %v\n", err)
		return 2
	}
	if len(operations) == 0 {
		fmt.Fprintf(os.Stderr, "checker: %s holds no operation: nothing was checked\n", path)
		return 2
	}
	for _, o := range operations {
		if o.Client >= maxClients || o.Slot >= inFlight {
			fmt.Fprintf(os.Stderr, "checker: client %d, slot %d: at most %d clients with %d batches each can be checked\n",
				o.Client, o.Slot, maxClients, inFlight)
			return 2
		}
		o.lane = o.Client * inFlight
		if overtaking {
			o.lane += o.Slot
		}
	}
	recorded := len(operations)
	earlier, later := timeTravel(operations)
	if snapshots {
		bounded(operations)
	}
	if seenEarly {
		forgetWhatWasSeen(operations, outages)
	}
	histories := byKey(resent(operations, outages))
	results := checkAll(histories, timeout)

	bad, undecided := 0, 0
	var keys []string
	for key := range histories {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	for _, key := range keys {
		switch results[key] {
		case porcupine.Illegal:
			bad++
			if bad == 1 && !quiet {
				picture := filepath.Join(filepath.Dir(path), filepath.Base(path)+"."+key+".html")
				explain(os.Stdout, key, histories[key], timeout, picture)
			}
		case porcupine.Unknown:
			undecided++
			if undecided == 1 {
				fmt.Printf("key %s: not decided within %v (%d operations): record a shorter history\n", key, timeout, len(histories[key]))
			}
		}
	}
	if earlier != nil {
		fmt.Printf("store time went back: client %d had an answer decided at %d before client %d asked what was decided at %d\n",
			earlier.Client, earlier.At, later.Client, later.At)
	}
	switch {
	case bad > 0:
		fmt.Printf("%d of %d histories are not linearizable\n", bad, len(histories))
		return 1
	case earlier != nil:
		return 1
	case undecided > 0:
		fmt.Printf("%d of %d histories were not decided\n", undecided, len(histories))
		return 2
	}
	fmt.Printf("%d histories, %d operations%s: linearizable\n", len(histories), recorded, unanswered(operations))
	return 0
}

func unanswered(operations []*operation) string {
	lost := 0
	for _, o := range operations {
		if o.lost() {
			lost++
		}
	}
	if lost == 0 {
		return ""
	}
	return fmt.Sprintf(" (%d without a reply)", lost)
}

// checkAll checks the histories, as many at a time as there are processors.
func checkAll(histories map[string][]*operation, timeout time.Duration) map[string]porcupine.CheckResult {
	results := map[string]porcupine.CheckResult{}
	var mutex sync.Mutex
	var group sync.WaitGroup
	free := make(chan struct{}, runtime.NumCPU())
	for key, of := range histories {
		group.Add(1)
		free <- struct{}{}
		go func(key string, of []*operation) {
			defer group.Done()
			result := check(of, timeout)
			mutex.Lock()
			results[key] = result
			mutex.Unlock()
			<-free
		}(key, of)
	}
	group.Wait()
	return results
}
