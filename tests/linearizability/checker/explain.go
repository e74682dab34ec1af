package main

import (
	"context"
	"fmt"
	"io"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

// shown is how many operations an explanation prints; the picture has them all.
const shown = 14

// shrinkTime bounds the search for a smaller example.
const shrinkTime = 20 * time.Second

// prepared numbers the operations of unknown outcome and hands all to porcupine.
func prepared(operations []*operation) (model porcupine.Model, history []porcupine.Operation, unanswered int) {
	history = make([]porcupine.Operation, len(operations))
	var lost []*operation
	for i, o := range operations {
		history[i] = porcupine.Operation{ClientId: o.row(), Input: o, Call: o.Call, Return: o.Return}
		if o.lost() {
			history[i].Return = o.Call // what it may still do, the model knows
			o.number = len(lost)
			lost = append(lost, o)
		}
	}
	return modelOf(lost), history, len(lost)
}

// row is where the picture draws the operation: those of one batch would lie on each other.
func (o *operation) row() int { return o.Client*8 + int(o.Sequence%8) }

func check(operations []*operation, timeout time.Duration) porcupine.CheckResult {
	model, history, lost := prepared(operations)
	if lost > lostMax {
		return porcupine.Unknown
	}
	return porcupine.CheckOperationsTimeout(model, history, timeout)
}

// until is the history as it was at time t: what was not answered then has no reply yet.
func until(operations []*operation, t int64) []*operation {
	var prefix []*operation
	for _, o := range operations {
		switch {
		case o.Call > t:
		case o.Return <= t || o.lost():
			prefix = append(prefix, o)
		default:
			pending := *o
			pending.Outcome, pending.Applied, pending.Record = "error", "unknown", nil
			prefix = append(prefix, &pending)
		}
	}
	return prefix
}

// changesNothing says that the operation was told so: without it the rest must be possible just the same.
func (o *operation) changesNothing() bool {
	switch o.Outcome {
	case "fenced", "in flight", "not due", "mismatch", "late", "replay":
		return true
	case "found":
		return true
	}
	return o.refused()
}

// smallest gives a history that is as impossible as the given one and ends with the first answer that cannot be explained.
func smallest(operations []*operation, timeout time.Duration) (prefix []*operation, last *operation) {
	impossible := func(of []*operation) bool { return check(of, timeout) == porcupine.Illegal }
	byReturn := append([]*operation(nil), operations...)
	sort.Slice(byReturn, func(i, j int) bool { return byReturn[i].Return < byReturn[j].Return })
	first := sort.Search(len(byReturn)-1, func(i int) bool { return impossible(until(operations, byReturn[i].Return)) })
	last = byReturn[first]
	prefix = until(operations, last.Return)
	deadline := time.Now().Add(shrinkTime)
	for size := len(prefix) / 2; size > 0; size /= 2 {
		for from := 0; from < len(prefix) && time.Now().Before(deadline); {
			var kept []*operation
			for i, o := range prefix {
				if i < from || i >= from+size || o == last || !o.changesNothing() {
					kept = append(kept, o)
				}
			}
			if len(kept) < len(prefix) && impossible(kept) {
				prefix = kept
			} else {
				from += size
			}
		}
	}
	return prefix, last
}

// explain prints why the history of a key is impossible and draws it into a file.
func explain(out io.Writer, key string, operations []*operation, timeout time.Duration, picture string) {
	prefix, last := smallest(operations, timeout)
	model, history, _ := prepared(prefix)
	result, info := porcupine.CheckOperationsVerbose(model, history, timeout)
	fmt.Fprintf(out, "key %s: not linearizable. Of %d operations these are enough, %d in all; the last ones:\n", key, len(operations), len(prefix))
	sort.SliceStable(prefix, func(i, j int) bool { return prefix[i].Return < prefix[j].Return })
	if skipped := len(prefix) - shown; skipped > 0 {
		prefix = prefix[skipped:]
	}
	for _, o := range prefix {
		mark := " "
		if o == last {
			mark = ">"
		}
		fmt.Fprintf(out, " %s client %d, %d to %d ns: %v\n", mark, o.Client, o.Call, o.Return, o)
	}
	if result == porcupine.Illegal {
		contradiction(out, model, info, last)
	}
	if err := porcupine.VisualizePath(model, info, picture); err != nil {
		fmt.Fprintf(out, "  the picture could not be written: %v\n", err)
	} else {
		fmt.Fprintf(out, "  picture: %s\n", picture)
	}
}

// contradiction prints what the specification would have said where as much as possible of the rest is explained.
func contradiction(out io.Writer, model porcupine.Model, info porcupine.LinearizationInfo, last *operation) {
	var longest []porcupine.Operation
	for _, partition := range info.PartialLinearizationsOperations() {
		for _, order := range partition {
			done := false
			for _, o := range order {
				done = done || o.Input.(*operation) == last
			}
			if !done && len(order) > len(longest) {
				longest = order
			}
		}
	}
	ways := model.Init()
	for _, o := range longest {
		_, ways = model.StepContext(context.Background(), ways, o.Input, nil)
	}
	if len(ways.(guesses)) == 0 {
		return
	}
	s := ways.(guesses)[0].state
	fmt.Fprintf(out, "  before the last one (>) the key holds: %v\n", s)
	if last.Outcome == "error" {
		return
	}
	if !last.snapshot() && last.At < s.decided.lo {
		fmt.Fprintf(out, "  but it was decided at %d: the store's clock went back\n", last.At)
		return
	}
	for _, w := range worlds(s, last, exactly(last.At), latest(last)) {
		fmt.Fprintf(out, "  so the answer is: %s %s", w.said.outcome, w.said.kind)
		if last.Record != nil && !w.said.gone {
			copied := w
			if differs := copied.difference(last.Record); differs != "" {
				fmt.Fprintf(out, " (the record shown has another: %s)", differs)
			}
		}
		fmt.Fprintln(out)
	}
}
