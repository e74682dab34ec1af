package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"sort"
	"time"
)

// policy is what a grant was given under.
type policy struct {
	Message            bool   `json:"message"`
	OnUnknown          string `json:"on_unknown"`
	ReplayFailed       bool   `json:"replay_failed"`
	MaxAttempts        int64  `json:"max_attempts"`
	MaxCrashes         int64  `json:"max_crashes"`
	RetentionCompleted int64  `json:"retention_completed_us"`
	RetentionFailed    int64  `json:"retention_failed_us"`
	RetentionDead      int64  `json:"retention_dead_us"`
}

// record is a record as an outcome shows it. Times are store times in microseconds, 0 if there is none.
type record struct {
	Status          string `json:"status"`
	Final           bool   `json:"final"`
	Cancelled       bool   `json:"cancelled"`
	Fingerprint     int64  `json:"fingerprint"`
	Attempt         int64  `json:"attempt"`
	Uncharged       int64  `json:"uncharged"`
	Crashes         int64  `json:"crashes"`
	SecondPayments  int64  `json:"second_payments"`
	FollowsUnknown  bool   `json:"follows_unknown"`
	Generation      int64  `json:"generation"`
	Due             int64  `json:"due"`
	ScheduledCopy   bool   `json:"scheduled_copy"`
	Token           int64  `json:"token"`
	Nonce           string `json:"nonce"`
	Owner           string `json:"owner"`
	Peer            string `json:"peer"`
	LeaseEnd        int64  `json:"lease_end"`
	Started         bool   `json:"started"`
	Created         int64  `json:"created"`
	Completed       int64  `json:"completed"`
	Expires         int64  `json:"expires"`
	Policy          policy `json:"policy"`
	Answer          string `json:"answer"`
	Failure         string `json:"failure"`
	FailureMessage  string `json:"failure_message"`
	InputTokens     int64  `json:"input_tokens"`
	LetterPublished bool   `json:"letter_published"`
}

// operation is one line of a history: what was asked and, from Outcome on, what came back.
type operation struct {
	Client   int    `json:"client"`
	Slot     int    `json:"slot"`
	Sequence int64  `json:"sequence"`
	Key      string `json:"key"`
	Call     int64  `json:"call"`
	Return   int64  `json:"return"`

	Op             string `json:"op"`
	Fingerprint    int64  `json:"fingerprint"`
	Owner          string `json:"owner"`
	Peer           string `json:"peer"`
	Nonce          string `json:"nonce"`
	Token          int64  `json:"token"`
	Lease          int64  `json:"lease_us"`
	NotAfter       int64  `json:"not_after"`
	Policy         policy `json:"policy"`
	StartsCall     bool   `json:"starts_call"`
	ChargeCrash    bool   `json:"charge_crash"`
	Answer         string `json:"answer"`
	InputTokens    int64  `json:"input_tokens"`
	Certainty      string `json:"certainty"`
	Failure        string `json:"failure"`
	FailureMessage string `json:"failure_message"`
	Delay          int64  `json:"delay_us"`
	ScheduledCopy  bool   `json:"scheduled_copy"`
	Decision       string `json:"decision"`
	Reason         string `json:"reason"`
	Generation     int64  `json:"generation"`

	Outcome           string  `json:"outcome"`
	Applied           string  `json:"applied"` // of an error
	At                int64   `json:"at"`      // store time of the decision
	Kind              string  `json:"kind"`
	GrantedToken      int64   `json:"granted_token"`
	Attempt           int64   `json:"attempt"`
	GenerationGranted int64   `json:"generation_granted"`
	LeaseEnd          int64   `json:"lease_end"`
	SecondPayment     bool    `json:"second_payment"`
	Created           int64   `json:"created"`
	OwnerSeen         string  `json:"owner_seen"`
	PeerSeen          string  `json:"peer_seen"`
	RemainingMs       int64   `json:"remaining_ms"`
	CopySeen          bool    `json:"copy_seen"`
	StatusSeen        string  `json:"status_seen"`
	Record            *record `json:"record"`

	// Not of the history. A copy of the step that may have been done before its reply was lost, see resent.
	ghost   *operation
	isGhost bool
	// Those of one lane are done in the order of their sequence.
	lane int
	// Of an operation of unknown outcome: its place among those of the key.
	number int
	// Asked while the server was away: order among its client's operations is not promised.
	unordered bool
	// The store times between which it was decided, by what was answered before it was asked and what was asked after it was
	// answered. See bounded.
	earliest, latest int64
}

// lost says that nobody knows whether the step was done.
func (o *operation) lost() bool { return o.Outcome == "error" && o.Applied == "unknown" }

// refused says that the step was certainly not done.
func (o *operation) refused() bool { return o.Outcome == "error" && o.Applied == "no" }

// outage is a time during which the server was away.
type outage struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
}

func (a outage) overlaps(o *operation) bool { return o.Call <= a.To && a.From <= o.Return }

type line struct {
	operation
	Outage *outage `json:"outage"`
}

// readHistory reads a file of one JSON object per line.
func readHistory(path string) ([]*operation, []outage, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer file.Close()
	var operations []*operation
	var outages []outage
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 1<<20)
	for number := 1; scanner.Scan(); number++ {
		var l line
		if err := json.Unmarshal(scanner.Bytes(), &l); err != nil {
			return nil, nil, fmt.Errorf("%s:%d: %v", path, number, err)
		}
		if l.Outage != nil {
			outages = append(outages, *l.Outage)
			continue
		}
		o := l.operation
		operations = append(operations, &o)
	}
	return operations, outages, scanner.Err()
}

// byKey splits the operations into one history per key, each sorted by call. An answer of a key says nothing about another's.
func byKey(operations []*operation) map[string][]*operation {
	keys := map[string][]*operation{}
	for _, o := range operations {
		keys[o.Key] = append(keys[o.Key], o)
	}
	for _, of := range keys {
		sort.SliceStable(of, func(i, j int) bool { return of[i].Call < of[j].Call })
	}
	return keys
}

// resent adds, for each operation that was under way during an outage, a copy of unknown outcome: the store may have done the step,
// lost the reply, and asked again. On databases (see snapshot) it only reads back what an acquire was granted.
func resent(operations []*operation, outages []outage) []*operation {
	all := operations
	for _, o := range operations {
		for _, a := range outages {
			if !a.overlaps(o) {
				continue
			}
			o.unordered = true
			again := o.Op != "get" && o.Outcome != "error"
			if o.snapshot() {
				again = o.Op == "acquire" && o.Outcome == "granted" && o.Kind == "repeated"
			}
			if again {
				ghost := *o
				ghost.isGhost, ghost.Outcome, ghost.Applied, ghost.Record = true, "error", "unknown", nil
				o.ghost = &ghost
				all = append(all, &ghost)
			}
			break
		}
	}
	return all
}

// flushedWithin is how long a commit that others see may take to reach the disk.
const flushedWithin = int64(100 * time.Millisecond)

// forgetWhatWasSeen takes out what was only seen during an outage or shortly before: on a database that shows a commit to others
// before it is on the disk, a crash may undo it before its writer was told. What was written stays judged: a later commit is on the
// disk only if the earlier ones are.
func forgetWhatWasSeen(operations []*operation, outages []outage) {
	for _, o := range operations {
		for _, a := range outages {
			early := outage{a.From - flushedWithin, a.To}
			if !early.overlaps(o) {
				continue
			}
			if o.changesNothing() {
				o.Outcome, o.Applied, o.Record = "error", "no", nil
			} else if o.Outcome == "unknown outcome" || o.Outcome == "exhausted" { // perhaps it was so before
				o.Outcome, o.Applied, o.Record = "error", "unknown", nil
			}
			break
		}
	}
}

// bounded tells each operation between which store times it can have been decided: not before what had been answered when it was
// asked, not after what was asked when it had been answered. Where times told are no order (see judge), these bounds remain.
func bounded(operations []*operation) {
	var decided []*operation
	for _, o := range operations {
		o.earliest, o.latest = 0, math.MaxInt64
		if o.Outcome != "error" {
			decided = append(decided, o)
		}
	}
	byReturn := append([]*operation(nil), decided...)
	sort.Slice(byReturn, func(i, j int) bool { return byReturn[i].Return < byReturn[j].Return })
	byCall := append([]*operation(nil), decided...)
	sort.Slice(byCall, func(i, j int) bool { return byCall[i].Call < byCall[j].Call })
	latestSoFar := make([]int64, len(byReturn)+1) // of the first i answers
	for i, o := range byReturn {
		latestSoFar[i+1] = max64(latestSoFar[i], o.At)
	}
	earliestFrom := make([]int64, len(byCall)+1) // of the i-th and later questions
	earliestFrom[len(byCall)] = math.MaxInt64
	for i := len(byCall) - 1; i >= 0; i-- {
		earliestFrom[i] = min64(earliestFrom[i+1], byCall[i].At)
	}
	for _, o := range operations {
		o.earliest = latestSoFar[sort.Search(len(byReturn), func(i int) bool { return byReturn[i].Return >= o.Call })]
		if o.lost() { // it may still be done
			continue
		}
		o.latest = earliestFrom[sort.Search(len(byCall), func(i int) bool { return byCall[i].Call > o.Return })]
	}
}

// timeTravel finds an operation that was decided before one that had been answered when it was asked: by one clock that never goes
// back this cannot be, whatever their keys.
func timeTravel(operations []*operation) (earlier, later *operation) {
	var decided []*operation
	for _, o := range operations {
		if o.Outcome != "error" {
			decided = append(decided, o)
		}
	}
	byReturn := append([]*operation(nil), decided...)
	sort.Slice(byReturn, func(i, j int) bool { return byReturn[i].Return < byReturn[j].Return })
	sort.Slice(decided, func(i, j int) bool { return decided[i].Call < decided[j].Call })
	var latest *operation
	next := 0
	for _, o := range decided {
		for ; next < len(byReturn) && byReturn[next].Return < o.Call; next++ {
			if latest == nil || byReturn[next].At > latest.At {
				latest = byReturn[next]
			}
		}
		if latest != nil && o.At < latest.At {
			return latest, o
		}
	}
	return nil, nil
}
