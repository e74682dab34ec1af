package main

import "math"

// The specification of one key, written from the contract and not from the code that it judges: who may do what to a record, what
// they are told, and what the record is afterwards.

const (
	absent     = ""
	processing = "processing"
	completed  = "completed"
	failed     = "failed"
	unknown    = "unknown"
	dead       = "dead"
)

// Bounds of a history: its clients, and their batches that are not answered at a time.
const (
	maxClients = 16
	inFlight   = 2
)

// state is all that matters of a key. Comparable with ==.
type state struct {
	// decided is when the last step was decided; a store's clock never goes back.
	decided span
	// sequence is the last operation done of each lane.
	sequence [maxClients * inFlight]int64

	status          string
	final           bool
	cancelled       bool
	fingerprint     int64
	attempt         int64
	uncharged       int64
	thisUncharged   bool // the current attempt is one of uncharged
	crashes         int64
	secondPayments  int64
	followsUnknown  bool
	generation      int64
	due             span
	scheduledCopy   bool
	token           span // also of a record that expired: the next one's is above
	nonce           string
	owner, peer     string
	leaseEnd        span
	started         bool
	created         span
	completed       span
	expires         span
	forEver         bool // no expires: undecided
	policy          policy
	answer          string
	failure         string
	failureMessage  string
	inputTokens     int64
	letterPublished bool
}

// answer is what the specification says to an operation. The record shown is the state after it.
type answer struct {
	outcome string
	kind    string // of a grant
	shows   bool   // outcome carries the record, or says that there is none
	gone    bool   // there is none
}

// world is a state during one step. Where bounds leave open what is the case, it takes the branch that its script says, so that
// running a step with all scripts gives all that can have happened.
type world struct {
	state
	now    span
	script []bool
	taken  int
}

func (w *world) either() bool {
	if w.taken == len(w.script) {
		w.script = append(w.script, true)
	}
	w.taken++
	return w.script[w.taken-1]
}

// over says whether moment t has come, t <= now.
func (w *world) over(t *span) bool {
	if t.hi <= w.now.lo {
		return true
	}
	if t.lo > w.now.hi {
		return false
	}
	if w.either() {
		w.now.lo, t.hi = max64(w.now.lo, t.lo), min64(t.hi, w.now.hi)
		return true
	}
	t.lo, w.now.hi = max64(t.lo, w.now.lo+1), min64(w.now.hi, t.hi-1)
	return false
}

func (w *world) tokenIs(v int64) bool {
	if w.token.exact() || v < w.token.lo || v > w.token.hi {
		return w.token.exact() && w.token.lo == v
	}
	if w.either() {
		w.token = exactly(v)
		return true
	}
	return false
}

func (w *world) live() bool {
	return w.status != absent && (w.forEver || !w.over(&w.expires))
}

func (w *world) owned(o *operation) bool { return w.nonce == o.Nonce && w.tokenIs(o.Token) }

func (w *world) same(outcome string) answer { return answer{outcome: outcome, shows: true} }

func (w *world) fenced() answer { return w.same("fenced") }

func (w *world) applied() answer { return w.same("applied") }

// ---- what transitions have in common

// ends the current attempt, which may have been paid or surely was not.
func (w *world) ends(status string, maybePaid bool) {
	free := (status == failed || status == dead) && !maybePaid
	if w.thisUncharged {
		w.uncharged--
	}
	if free {
		w.uncharged++
	}
	w.thisUncharged = free
	w.status = status
	w.started = maybePaid
}

// kept sets how long the record stays.
func (w *world) kept() {
	w.forEver = false
	switch {
	case w.status == processing || w.status == unknown,
		w.status == failed && !w.final && w.policy.Message,
		w.status == dead && w.policy.Message && !w.letterPublished:
		w.forEver = true
		w.expires = span{}
	case w.status == failed && !w.final:
		w.expires = w.now.plus(w.policy.RetentionFailed)
	case w.status == dead:
		w.expires = w.now.plus(w.policy.RetentionDead)
	default: // completed, or failed for good
		w.expires = w.now.plus(w.policy.RetentionCompleted)
	}
}

func (w *world) noLease() { w.leaseEnd = span{} }

func (w *world) notScheduled() { w.due, w.scheduledCopy = span{}, false }

func (w *world) becauseOf(failure, message string) { w.failure, w.failureMessage = failure, message }

func (w *world) leaseLost() { w.becauseOf("lease-lost", anyWords) }

// anyWords: what a store says to people about a failure that no owner reported is its own affair.
const anyWords = "*"

// dueNow: failed, and whoever comes may try.
func (w *world) dueNow() {
	w.notScheduled()
	if w.policy.Message {
		w.due = w.now
	}
	w.noLease()
	w.kept()
}

// nextToken is above every earlier one of the key, and not below the time.
func (w *world) nextToken() {
	next := span{lo: max64(w.token.lo+1, w.now.lo), hi: w.now.hi}
	if w.token.hi < math.MaxInt64 {
		next.hi = max64(w.token.hi+1, w.now.hi)
	}
	w.token = next
}

func (w *world) granted(o *operation, kind string) answer {
	w.status = processing
	w.nextToken()
	w.nonce, w.owner, w.peer = o.Nonce, o.Owner, o.Peer
	w.leaseEnd = w.now.plus(o.Lease)
	w.started = o.StartsCall
	w.policy = o.Policy
	w.attempt++
	w.thisUncharged = false
	w.kept()
	return answer{outcome: "granted", kind: kind}
}

func (w *world) grantedAgain(o *operation, kind string) answer {
	w.followsUnknown = w.started
	if w.started {
		w.secondPayments++
	}
	w.notScheduled()
	w.letterPublished = false
	w.inputTokens = -1
	return w.granted(o, kind)
}

func (w *world) budgetUsedUp(p policy) bool {
	return (p.MaxAttempts != 0 && w.attempt-w.uncharged >= p.MaxAttempts) || (p.MaxCrashes != 0 && w.crashes >= p.MaxCrashes)
}

func (w *world) exhausted(p policy) answer {
	w.policy = p
	w.notScheduled()
	w.noLease()
	w.status = dead
	w.kept()
	return w.same("exhausted")
}

// held: the call may have been paid, and whoever was granted it wanted no second one without a decision.
func (w *world) held() bool { return w.started && w.policy.OnUnknown != "rerun" }

func (w *world) hold() {
	w.ends(unknown, true)
	w.leaseLost()
	w.noLease()
	w.kept()
}

// decidedOver takes the record from its owner: neither of the owner's names is good any more.
func (w *world) decidedOver() {
	w.nextToken()
	w.nonce = noNonce
	w.owner, w.peer = "", ""
	w.noLease()
}

const noNonce = "00000000000000000000000000000000"

func (w *world) anew() {
	w.status = failed
	w.uncharged = w.attempt
	w.crashes = 0
	w.letterPublished = false
	w.dueNow()
}

func (w *world) complete(text string) {
	w.answer = text
	w.status = completed
	w.becauseOf("", "")
	w.notScheduled()
	w.noLease()
	w.completed = w.now
	w.kept()
}

// ---- the operations

func (w *world) step(o *operation) answer {
	if o.Op == "acquire" {
		return w.acquire(o)
	}
	if !w.live() {
		if o.Op == "get" || o.Op == "settle" {
			return answer{outcome: "found", shows: true, gone: true}
		}
		return answer{outcome: "fenced", shows: true, gone: true}
	}
	switch o.Op {
	case "get":
		return w.same("found")
	case "start":
		if w.status != processing || !w.owned(o) {
			return w.fenced()
		}
		w.started = true
		return w.applied()
	case "renew":
		if w.status != processing || !w.owned(o) {
			return w.fenced()
		}
		w.leaseEnd = w.now.plus(o.Lease)
		return w.applied()
	case "release":
		return w.release(o)
	case "complete":
		if !w.owned(o) || (w.final && w.status != completed) {
			return w.fenced()
		}
		if w.status == completed { // said again
			return w.applied()
		}
		w.ends(completed, true)
		w.inputTokens = o.InputTokens
		w.complete(o.Answer)
		return w.applied()
	case "fail":
		return w.fail(o)
	case "cancel":
		return w.cancel(o)
	case "settle":
		return w.settle(o)
	case "resolve":
		return w.resolve(o)
	case "reopen":
		return w.reopen(o)
	case "letter_published":
		if w.status != dead || !w.tokenIs(o.Token) {
			return w.fenced()
		}
		if !w.letterPublished {
			w.letterPublished = true
			w.kept()
		}
		return w.applied()
	}
	return answer{outcome: "an operation that the specification does not know"}
}

func (w *world) acquire(o *operation) answer {
	if o.unordered && w.either() {
		return w.readBack(o)
	}
	tooLate := exactly(o.NotAfter + 1)
	if w.over(&tooLate) {
		return answer{outcome: "late"}
	}
	if !w.live() {
		w.state = state{decided: w.decided, sequence: w.sequence, token: w.token}
		w.nonce, w.generation, w.inputTokens = noNonce, 1, -1
		w.created = w.now
		w.fingerprint = o.Fingerprint
		return w.granted(o, "fresh")
	}
	if w.fingerprint != o.Fingerprint {
		return answer{outcome: "mismatch"}
	}
	switch w.status {
	case processing:
		if w.nonce == o.Nonce { // the reply was lost
			w.leaseEnd = w.now.plus(o.Lease)
			return answer{outcome: "granted", kind: "repeated"}
		}
		if !w.over(&w.leaseEnd) {
			return answer{outcome: "in flight"}
		}
		if w.held() {
			w.hold()
			return w.same("unknown outcome")
		}
		w.ends(failed, w.started)
		w.leaseLost()
		if o.ChargeCrash {
			w.crashes++
		}
		if w.budgetUsedUp(o.Policy) {
			return w.exhausted(o.Policy)
		}
		return w.grantedAgain(o, "takeover")
	case failed:
		if w.final {
			return w.same("replay")
		}
		if w.policy.Message && !w.over(&w.due) {
			return answer{outcome: "not due"}
		}
		if w.budgetUsedUp(o.Policy) {
			return w.exhausted(o.Policy)
		}
		return w.grantedAgain(o, "retry")
	case completed:
		return w.same("replay")
	case unknown:
		return w.same("unknown outcome")
	default:
		return w.same("exhausted")
	}
}

// readBack: the reply was lost, and what was granted is only read, neither renewed nor refused for being late.
func (w *world) readBack(o *operation) answer {
	if !w.live() || w.status != processing || w.nonce != o.Nonce {
		return answer{outcome: "nothing to read back"}
	}
	return answer{outcome: "granted", kind: "repeated"}
}

func (w *world) release(o *operation) answer {
	// By the nonce alone where the token was lost with the reply.
	if w.nonce != o.Nonce || (o.Token != 0 && !w.tokenIs(o.Token)) {
		return w.fenced()
	}
	if w.status == failed && !w.final { // said again, or there is nothing to give back
		return w.applied()
	}
	if w.status != processing {
		return w.fenced()
	}
	w.ends(failed, false)
	w.becauseOf("released", anyWords)
	w.dueNow()
	return w.applied()
}

func (w *world) fail(o *operation) answer {
	if w.status == completed || !w.owned(o) {
		return w.fenced()
	}
	if w.final {
		if w.cancelled || o.Certainty != "refused_for_good" {
			return w.fenced()
		}
		return w.applied() // said again
	}
	if o.Certainty == "refused_for_good" {
		w.ends(failed, true)
		w.final = true
		w.answer = o.Answer
		w.completed = w.now
	} else {
		maybePaid := o.Certainty == "unknown"
		to := failed
		switch {
		case w.status == dead:
			to = dead
		case maybePaid && w.policy.OnUnknown != "rerun":
			to = unknown
		}
		if w.status == to && w.started == maybePaid && w.failure == o.Failure && w.failureMessage == o.FailureMessage {
			return w.applied() // said again
		}
		w.ends(to, maybePaid)
	}
	w.notScheduled()
	if w.status == failed && !w.final && w.policy.Message {
		w.due, w.scheduledCopy = w.now.plus(o.Delay), o.ScheduledCopy
	}
	w.becauseOf(o.Failure, o.FailureMessage)
	w.inputTokens = o.InputTokens
	w.noLease()
	if w.status != dead { // how long its letter is kept was settled when it died
		w.kept()
	}
	return w.applied()
}

func (w *world) cancel(o *operation) answer {
	if !w.owned(o) {
		return w.fenced()
	}
	if w.cancelled {
		return w.applied()
	}
	if w.status != processing && w.status != unknown {
		return w.fenced()
	}
	w.status, w.final, w.cancelled = failed, true, true
	w.becauseOf("cancelled", anyWords)
	w.inputTokens = o.InputTokens
	w.completed = w.now
	w.noLease()
	w.kept()
	return w.applied()
}

func (w *world) settle(o *operation) answer {
	if w.status != processing || !w.tokenIs(o.Token) || !w.over(&w.leaseEnd) {
		return w.same("found")
	}
	if w.held() {
		w.hold()
		return w.applied()
	}
	w.ends(failed, w.started)
	w.leaseLost()
	w.dueNow()
	return w.applied()
}

func (w *world) resolve(o *operation) answer {
	if (w.status != unknown && w.status != dead) || !w.tokenIs(o.Token) {
		return w.fenced()
	}
	w.decidedOver()
	switch o.Decision {
	case "completed":
		text := o.Answer
		if text == "" {
			text = "not kept"
		}
		w.complete(text)
	case "failed":
		w.ends(failed, w.started)
		w.letterPublished = false
		w.becauseOf("resolved", o.Reason)
		w.dueNow()
	case "rerun":
		w.becauseOf("resolved", o.Reason)
		w.anew()
	}
	return w.applied()
}

func (w *world) reopen(o *operation) answer {
	if w.generation == o.Generation+1 && w.fingerprint == o.Fingerprint {
		return w.applied()
	}
	if w.generation != o.Generation || (w.status != unknown && w.status != dead) {
		return w.fenced()
	}
	w.decidedOver()
	w.generation++
	w.fingerprint = o.Fingerprint
	w.becauseOf("reopened", anyWords)
	w.anew()
	return w.applied()
}
