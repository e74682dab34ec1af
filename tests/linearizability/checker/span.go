package main

import "math"

// span is a number that is known, or known to lie within bounds: what an operation of unknown outcome wrote depends on when it was
// done, and nobody was told. It becomes exact as soon as an outcome shows it.
type span struct {
	lo, hi int64
	// offset is by how much the number lies beyond the time of the decision that wrote it.
	offset int64
}

func exactly(v int64) span { return span{lo: v, hi: v} }

func (s span) exact() bool { return s.lo == s.hi }

func (s span) plus(d int64) span {
	if s.hi > math.MaxInt64-d {
		return span{s.lo + d, math.MaxInt64, s.offset + d}
	}
	return span{s.lo + d, s.hi + d, s.offset + d}
}

// by limits the span by a later decision at now: what wrote it was decided before.
func (s *span) by(now int64) {
	if s.exact() || now > math.MaxInt64-s.offset {
		return
	}
	if s.hi > now+s.offset {
		s.hi = max64(s.lo, now+s.offset)
	}
}

// shows takes in that the number is v, and says whether it can be.
func (s *span) shows(v int64) bool {
	if v < s.lo || v > s.hi {
		return false
	}
	*s = exactly(v)
	return true
}

func max64(a, b int64) int64 {
	if a > b {
		return a
	}
	return b
}

func min64(a, b int64) int64 {
	if a < b {
		return a
	}
	return b
}
