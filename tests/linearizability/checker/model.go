package main

import (
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/anishathalye/porcupine"
)

// lostMax bounds the operations of unknown outcome of one key.
const lostMax = 128

// waiting is a set of operations of unknown outcome that may still be done. Comparable with ==.
type waiting [lostMax / 64]uint64

func (w waiting) has(i int) bool { return w[i/64]>>(i%64)&1 == 1 }

func (w waiting) with(i int) waiting {
	w[i/64] |= 1 << (i % 64)
	return w
}

func (w waiting) without(i int) waiting {
	w[i/64] &^= 1 << (i % 64)
	return w
}

func (w waiting) holds(other waiting) bool {
	for i := range w {
		if other[i]&^w[i] != 0 {
			return false
		}
	}
	return true
}

// guess is one way in which everything so far can have happened.
type guess struct {
	state
	waiting
}

// guesses are all ways. Without operations of unknown outcome there is one.
type guesses []guess

// add takes in another way, unless one that is there allows as much and more.
func (all guesses) add(g guess) guesses {
	kept := all[:0:0]
	for _, other := range all {
		if other.state == g.state {
			if other.waiting.holds(g.waiting) {
				return all
			}
			if g.waiting.holds(other.waiting) {
				continue
			}
		}
		kept = append(kept, other)
	}
	return append(kept, g)
}

func (all guesses) equal(others guesses) bool {
	if len(all) != len(others) {
		return false
	}
	for _, g := range all {
		found := false
		for _, other := range others {
			if g == other {
				found = true
				break
			}
		}
		if !found {
			return false
		}
	}
	return true
}

// modelOf judges one key's operations: each must be possible at the store time at which it says that it was decided. An operation of
// unknown outcome is taken as asked at the moment of its call; from then on it may be done before any other one, once, or never.
func modelOf(lost []*operation) porcupine.Model {
	return porcupine.Model{
		Init: func() interface{} { return guesses{{}} },
		StepContext: func(ctx context.Context, s, input, _ interface{}) (bool, interface{}) {
			next := s.(guesses).after(ctx, input.(*operation), lost)
			return len(next) > 0, next
		},
		Equal:             func(a, b interface{}) bool { return a.(guesses).equal(b.(guesses)) },
		DescribeOperation: func(input, _ interface{}) string { return input.(*operation).String() },
		DescribeState: func(s interface{}) string {
			var words []string
			for _, g := range s.(guesses) {
				words = append(words, g.state.String())
			}
			return strings.Join(words, " or ")
		},
	}
}

func (all guesses) after(ctx context.Context, o *operation, lost []*operation) guesses {
	var next guesses
	if o.refused() {
		return all
	}
	if o.lost() {
		for _, g := range all {
			next = next.add(guess{g.state, g.waiting.with(o.number)})
		}
		return next
	}
	seen := map[guess]bool{}
	for _, g := range all {
		seen[g] = true
	}
	for todo := append(guesses(nil), all...); len(todo) > 0 && ctx.Err() == nil; {
		g := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if o.ghost != nil { // the copy was done before the one that was answered, or never
			next = next.addAll(after(g.state, o), g.waiting.without(o.ghost.number))
		} else {
			next = next.addAll(after(g.state, o), g.waiting)
		}
		for i, l := range lost {
			if !g.waiting.has(i) {
				continue
			}
			for _, w := range worlds(g.state, l, lostTime(g.state, l, o), latest(o)) {
				if done := (guess{w.state, g.waiting.without(i)}); w.wrote(g.state) && !seen[done] {
					seen[done] = true
					todo = append(todo, done)
				}
			}
		}
	}
	return next
}

func (all guesses) addAll(states []state, w waiting) guesses {
	for _, s := range states {
		all = all.add(guess{s, w})
	}
	return all
}

// after gives all states that the operation can have led to, given what came back. None: it cannot have been done here.
func after(s state, o *operation) []state {
	if !o.unordered {
		if s.sequence[o.lane] > o.Sequence {
			return nil
		}
		s.sequence[o.lane] = o.Sequence
	}
	if o.snapshot() {
		s.decided = span{} // says nothing
	} else if o.At < s.decided.lo {
		return nil // the store's clock went back
	}
	var possible []state
	for _, w := range worlds(s, o, exactly(o.At), latest(o)) {
		if w.matches(o) {
			possible = append(possible, w.state)
		}
	}
	return possible
}

// snapshot says that the operation was decided on what it saw at its store time, and took effect at a later one, if what it saw was
// still there: so do operations on a database, whose transactions are seen when they end. Those that do not overlap are in the order
// of their times all the same (see timeTravel).
func (o *operation) snapshot() bool { return o.latest != 0 }

// latest is the store time after which nothing that the operation saw can have been decided.
func latest(o *operation) int64 {
	if o.snapshot() {
		return o.latest
	}
	return o.At
}

// lostTime is when an operation of unknown outcome was decided, if it was done before the step o.
func lostTime(s state, lost, o *operation) span {
	if o.snapshot() {
		return span{lo: lost.earliest, hi: latest(o)}
	}
	return span{lo: s.decided.lo, hi: o.At}
}

// wrote says whether the step changed what was there.
func (w *outcomeWorld) wrote(before state) bool {
	switch w.said.outcome {
	case "granted":
		return true
	case "applied":
		before.decided = w.decided
		return w.state != before
	case "unknown outcome", "exhausted":
		return w.status != before.status
	}
	return false
}

// outcomeWorld is a world after a step, and what was answered in it.
type outcomeWorld struct {
	world
	said answer
}

// worlds runs the operation at a time within now, in all ways that the bounds leave open. What it sees was decided by `seen`.
func worlds(s state, o *operation, now span, seen int64) []outcomeWorld {
	for _, known := range []*span{&s.decided, &s.due, &s.token, &s.leaseEnd, &s.created, &s.completed, &s.expires} {
		known.by(seen)
	}
	var all []outcomeWorld
	var script []bool
	for {
		w := world{state: s, now: now, script: script}
		said := w.step(o)
		if !o.snapshot() {
			w.decided = w.now
		}
		all = append(all, outcomeWorld{w, said})
		// The next script: the last branch not yet taken both ways.
		script = w.script
		for len(script) > 0 && !script[len(script)-1] {
			script = script[:len(script)-1]
		}
		if len(script) == 0 {
			return all
		}
		script = append([]bool(nil), script...)
		script[len(script)-1] = false
	}
}

// matches says whether what came back is what was answered in this world, and takes in what it shows.
func (w *outcomeWorld) matches(o *operation) bool {
	if w.said.outcome != o.Outcome {
		return false
	}
	switch o.Outcome {
	case "granted":
		return w.said.kind == o.Kind && w.attempt == o.Attempt && w.generation == o.GenerationGranted &&
			w.followsUnknown == o.SecondPayment && w.token.shows(o.GrantedToken) && w.leaseEnd.shows(o.LeaseEnd) &&
			w.created.shows(o.Created)
	case "in flight":
		return w.owner == o.OwnerSeen && w.peer == o.PeerSeen && w.token.shows(o.GrantedToken) && w.created.shows(o.Created) &&
			w.remains(&w.leaseEnd, o.RemainingMs)
	case "not due":
		return w.scheduledCopy == o.CopySeen && w.remains(&w.due, o.RemainingMs)
	case "mismatch":
		return w.status == o.StatusSeen
	case "late":
		return true
	}
	if !w.said.shows {
		return false
	}
	if w.said.gone || o.Record == nil {
		return w.said.gone && o.Record == nil
	}
	return w.difference(o.Record) == ""
}

// remains says whether it is so many milliseconds, rounded up, until then.
func (w *world) remains(until *span, ms int64) bool {
	lo, hi := w.now.lo+(ms-1)*1000+1, w.now.lo+ms*1000
	if until.hi < lo || until.lo > hi {
		return false
	}
	until.lo, until.hi = max64(until.lo, lo), min64(until.hi, hi)
	return true
}

// difference names what the record shown has otherwise than this world; empty: nothing.
func (w *world) difference(r *record) string {
	var differs []string
	check := func(name string, same bool) {
		if !same {
			differs = append(differs, name)
		}
	}
	check("status", w.status == r.Status)
	check("final", w.final == r.Final)
	check("cancelled", w.cancelled == r.Cancelled)
	check("fingerprint", w.fingerprint == r.Fingerprint)
	check("attempt", w.attempt == r.Attempt)
	check("uncharged attempts", w.uncharged == r.Uncharged)
	check("crashes charged", w.crashes == r.Crashes)
	check("possible second payments", w.secondPayments == r.SecondPayments)
	check("follows unknown", w.followsUnknown == r.FollowsUnknown)
	check("generation", w.generation == r.Generation)
	check("due", w.due.shows(r.Due))
	check("scheduled copy", w.scheduledCopy == r.ScheduledCopy)
	check("token", w.token.shows(r.Token))
	check("nonce", w.nonce == r.Nonce)
	check("owner", w.owner == r.Owner && w.peer == r.Peer)
	check("lease end", w.leaseEnd.shows(r.LeaseEnd))
	check("call started", w.started == r.Started)
	check("created", w.created.shows(r.Created))
	check("completed", w.completed.shows(r.Completed))
	check("expires", w.expires.shows(r.Expires))
	check("policy", w.policy == r.Policy)
	check("answer", w.answer == r.Answer)
	check("failure", w.failure == r.Failure && (w.failureMessage == anyWords || w.failureMessage == r.FailureMessage))
	check("input tokens", w.inputTokens == r.InputTokens)
	check("letter published", w.letterPublished == r.LetterPublished)
	return strings.Join(differs, ", ")
}

// ---- in words

func (o *operation) String() string {
	asked := o.Op
	switch o.Op {
	case "acquire":
		asked += fmt.Sprintf("(nonce %.6s, request %d, lease %d ms)", o.Nonce, o.Fingerprint, o.Lease/1000)
	case "get":
	case "settle", "letter_published":
		asked += fmt.Sprintf("(token %d)", o.Token)
	case "resolve":
		asked += fmt.Sprintf("(token seen %d, %s)", o.Token, o.Decision)
	case "reopen":
		asked += fmt.Sprintf("(generation seen %d, request %d)", o.Generation, o.Fingerprint)
	default:
		asked += fmt.Sprintf("(token %d, nonce %.6s", o.Token, o.Nonce)
		if o.Certainty != "" {
			asked += ", " + o.Certainty
		}
		asked += ")"
	}
	if o.isGhost {
		return asked + " -> perhaps done before it was asked again"
	}
	return asked + " -> " + o.came()
}

func (o *operation) came() string {
	switch o.Outcome {
	case "error":
		if o.lost() {
			return "no reply"
		}
		return "an error, certainly not done"
	case "granted":
		return fmt.Sprintf("at %d granted (%s, token %d, attempt %d, lease end %d)", o.At, o.Kind, o.GrantedToken, o.Attempt, o.LeaseEnd)
	case "in flight":
		return fmt.Sprintf("at %d in flight (token %d, %d ms remain)", o.At, o.GrantedToken, o.RemainingMs)
	case "not due":
		return fmt.Sprintf("at %d not due (%d ms remain)", o.At, o.RemainingMs)
	}
	words := fmt.Sprintf("at %d %s", o.At, o.Outcome)
	if o.Record != nil {
		words += " (" + o.Record.String() + ")"
	}
	return words
}

func (r *record) String() string {
	words := fmt.Sprintf("%s, token %d, nonce %.6s, attempt %d", r.Status, r.Token, r.Nonce, r.Attempt)
	for _, moment := range []struct {
		name string
		at   int64
	}{{"lease end", r.LeaseEnd}, {"due", r.Due}, {"expires", r.Expires}} {
		if moment.at != 0 {
			words += fmt.Sprintf(", %s %d", moment.name, moment.at)
		}
	}
	if r.Answer != "" {
		words += ", '" + r.Answer + "'"
	}
	return words
}

func (s span) String() string {
	switch {
	case s.exact():
		return fmt.Sprint(s.lo)
	case s.hi == math.MaxInt64:
		return fmt.Sprintf("%d or later", s.lo)
	}
	return fmt.Sprintf("%d to %d", s.lo, s.hi)
}

func (s state) String() string {
	if s.status == absent {
		return "nothing"
	}
	words := fmt.Sprintf("%s, token %v, nonce %.6s, attempt %d", s.status, s.token, s.nonce, s.attempt)
	if s.status == processing {
		words += fmt.Sprintf(", lease end %v", s.leaseEnd)
	}
	if s.due != (span{}) {
		words += fmt.Sprintf(", due %v", s.due)
	}
	if !s.forEver {
		words += fmt.Sprintf(", expires %v", s.expires)
	}
	if s.answer != "" {
		words += ", '" + s.answer + "'"
	}
	return words + fmt.Sprintf("; last decision at %v", s.decided)
}
