//! Decides whether a connection must end. Example: it was idle too long. This is a state machine
//! that sees only the connection's counts of bytes and requests.

use std::time::Duration;

use downbeat_service::options::connection_options::ConnectionOptions;
use tokio::time::Instant;

use super::protocol::Protocol;
use super::watched::{Request, Seen};

/// The limit for a connection to end that was asked to and has nothing under way.
const FINISH_LIMIT: Duration = Duration::from_secs(5);
/// The shortest silence after which a client counts as stopped while the server drains. A lost
/// packet takes less.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);
/// How long the end of a connection waits for its peer's last bytes.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// Length of a client's first bytes over gRPC (the preface of HTTP/2, RFC 9113 §3.4).
const PREFACE: u64 = 24;
/// How long a connection is idle before it rests. A client with regular requests is faster than
/// that, and its connection is not made ready each time.
const REST_AFTER: Duration = Duration::from_secs(1);

/// The observations so far.
#[derive(Debug)]
pub(super) struct Look {
    /// When something was last under way.
    active: Instant,
    served: u64,
    /// Since when a head is awaited, and its number.
    head: Option<(Instant, u64)>,
    /// Since when the draining server waits for the rest of a request, and the bytes that had come
    /// by then.
    rest: Option<(Instant, u64)>,
    /// Since when the peer reads too little, and the bytes it had taken then.
    blocked: Option<(Instant, u64)>,
    /// Since when it was asked to end.
    finishing: Option<Instant>,
    /// Since when it waits for the peer's last bytes.
    closing: Option<Instant>,
}

/// The fate of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Stay,
    /// The connection should give back the memory that only a request needs.
    Rest,
    /// The connection should end without losing a request.
    Finish,
    /// The connection must end now, for this reason.
    Stop(&'static str),
}

impl Look {
    /// Makes the state of a connection that was accepted at `now`.
    pub fn new(now: Instant) -> Self {
        Look { active: now, served: 0, head: None, rest: None, blocked: None, finishing: None, closing: None }
    }

    /// Since when it is idle, if it can make room for another.
    pub fn idle_since(&self, seen: &Seen) -> Option<Instant> {
        (seen.is_idle() && seen.served == self.served && seen.asked <= Request::Rest).then_some(self.active)
    }

    /// When the port must look at it again unless bytes move on it. `Some(now)`: again and again;
    /// `None`: never.
    pub fn due(&self, now: Instant, seen: &Seen, options: &ConnectionOptions) -> Option<Instant> {
        let rests = seen.rests || !seen.may_rest();
        if !seen.is_idle() || seen.closing || !rests || seen.asked > Request::Rest {
            return Some(now);
        }
        options.idle_timeout.map(|limit| self.active + limit)
    }

    /// Looks at it at `now`, which never goes back.
    pub fn handle(&mut self, now: Instant, seen: &Seen, options: &ConnectionOptions, draining: bool) -> Verdict {
        if seen.served != self.served || !seen.is_idle() {
            self.active = now;
            self.served = seen.served;
        }
        let over = |since: Instant, limit: Duration| now.duration_since(since) >= limit;
        let transfer = options.transfer_timeout.unwrap_or(Duration::MAX);

        let same = self.head.filter(|(_, served)| *served == seen.served);
        self.head = seen.is_in_head().then_some(same.unwrap_or((now, seen.served)));
        if self.head.is_some_and(|(since, _)| over(since, transfer)) {
            return Verdict::Stop("the head of its request did not arrive in time");
        }

        let patience = options.linger.max(LEAST_PATIENCE);
        self.rest = (draining && seen.is_in_request()).then(|| self.rest.unwrap_or((now, seen.received)));
        if let Some((since, received)) = self.rest
            && over(since, patience)
        {
            if seen.received - received < options.least_in(patience) {
                return Verdict::Stop("the rest of its request does not come, and the server stops");
            }
            self.rest = Some((now, seen.received));
        }

        self.blocked = seen.write_blocked.then(|| self.blocked.unwrap_or((now, seen.sent)));
        if let Some((since, sent)) = self.blocked
            && over(since, transfer)
        {
            if seen.sent - sent < options.least() {
                return Verdict::Stop("its answer is not read");
            }
            self.blocked = Some((now, seen.sent));
        }

        self.closing = seen.closing.then(|| self.closing.unwrap_or(now));
        if self.closing.is_some_and(|since| over(since, CLOSE_LIMIT)) {
            return Verdict::Stop("it goes on sending after its last answer");
        }

        self.finishing = (seen.asked > Request::Rest).then(|| self.finishing.unwrap_or(now));
        if let Some(since) = self.finishing {
            let limit = if draining { patience } else { FINISH_LIMIT };
            let late = seen.requests == 0 && over(since, limit);
            return if late { Verdict::Stop("it was asked to end and did not") } else { Verdict::Stay };
        }

        self.when_idle(now, seen, options, draining)
    }

    /// The verdict on a connection that nothing holds up: whether it stays, rests or ends.
    fn when_idle(&self, now: Instant, seen: &Seen, options: &ConnectionOptions, draining: bool) -> Verdict {
        let over = |limit: Duration| now.duration_since(self.active) >= limit;
        if draining && seen.protocol == Protocol::Grpc && seen.received >= PREFACE {
            return Verdict::Finish;
        }
        let limit = if draining { Some(options.linger) } else { options.idle_timeout };
        if !limit.is_some_and(|limit| seen.is_idle() && over(limit)) {
            let rests = seen.may_rest() && !seen.rests && over(REST_AFTER);
            return if rests { Verdict::Rest } else { Verdict::Stay };
        }
        // Without a preface the peer understands no goodbye.
        if seen.protocol == Protocol::Grpc && seen.received < PREFACE {
            return Verdict::Stop("it did not say that it speaks HTTP/2");
        }
        Verdict::Finish
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: ConnectionOptions = ConnectionOptions {
        max_per_address: None,
        max: 1,
        idle_timeout: Some(Duration::from_secs(100)),
        transfer_timeout: Some(Duration::from_secs(10)),
        min_rate: 5,
        linger: Duration::from_secs(1),
    };

    fn seen(protocol: Protocol) -> Seen {
        Seen {
            protocol,
            requests: 0,
            served: 0,
            awaited: 0,
            received: 0,
            settled: 0,
            sent: 0,
            write_blocked: false,
            closing: false,
            rests: false,
            asked: Request::Stay,
        }
    }

    struct Looked {
        start: Instant,
        look: Look,
        seen: Seen,
        draining: bool,
    }

    impl Looked {
        fn new(protocol: Protocol) -> Looked {
            let start = tokio::time::Instant::now();
            Looked { start, look: Look::new(start), seen: seen(protocol), draining: false }
        }

        fn at(&mut self, second: u64) -> Verdict {
            self.look.handle(self.start + Duration::from_secs(second), &self.seen, &OPTIONS, self.draining)
        }

        fn due(&self, second: u64) -> Option<u64> {
            let due = self.look.due(self.start + Duration::from_secs(second), &self.seen, &OPTIONS);
            due.map(|due| due.duration_since(self.start).as_secs())
        }
    }

    #[test]
    fn an_idle_connection_ends_after_its_time_and_each_request_begins_it_anew() {
        let mut http = Looked::new(Protocol::Http);
        assert_eq!(http.at(99), Verdict::Rest);
        http.seen.served = 1;
        assert_eq!((http.at(100), http.at(199)), (Verdict::Stay, Verdict::Rest));
        assert_eq!(http.at(200), Verdict::Finish);
        http.seen.asked = Request::Finish;
        assert_eq!((http.at(201), http.at(205)), (Verdict::Stay, Verdict::Stay));
        assert!(matches!(http.at(206), Verdict::Stop(_)));
    }

    #[test]
    fn an_idle_http_connection_rests_once_and_is_due_when_its_time_is_over() {
        let mut http = Looked::new(Protocol::Http);
        assert_eq!(http.at(0), Verdict::Stay);
        assert_eq!(http.due(0), Some(0), "it has to rest yet");
        assert_eq!(http.at(1), Verdict::Rest);
        http.seen.rests = true;
        assert_eq!((http.at(2), http.due(2)), (Verdict::Stay, Some(100)));
        // Part of a head has come.
        (http.seen.rests, http.seen.received) = (false, 5);
        assert_eq!((http.at(3), http.due(3)), (Verdict::Stay, Some(3)));

        let mut grpc = Looked::new(Protocol::Grpc);
        grpc.seen.received = 100;
        assert_eq!((grpc.at(2), grpc.due(2)), (Verdict::Stay, Some(100)), "it keeps what it knows of its peer");
        (grpc.seen.requests, grpc.seen.served) = (1, 1);
        assert_eq!((grpc.at(3), grpc.due(3)), (Verdict::Stay, Some(3)));
    }

    #[test]
    fn a_request_may_take_as_long_as_it_likes() {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            let mut busy = Looked::new(protocol);
            (busy.seen.requests, busy.seen.served, busy.seen.received) = (1, 1, 100);
            assert_eq!((busy.at(1), busy.at(1000)), (Verdict::Stay, Verdict::Stay));
        }
    }

    #[test]
    fn a_head_that_trickles_in_is_not_waited_for() {
        let mut http = Looked::new(Protocol::Http);
        for second in 0..10 {
            http.seen.received += 1;
            assert_eq!(http.at(second), Verdict::Stay);
        }
        http.seen.received += 1;
        assert!(matches!(http.at(10), Verdict::Stop(_)));

        let mut next = Looked::new(Protocol::Http);
        next.seen.received = 5;
        assert_eq!(next.at(0), Verdict::Stay);
        // Another head than the one before.
        (next.seen.served, next.seen.settled, next.seen.received) = (1, 50, 55);
        assert_eq!((next.at(9), next.at(18)), (Verdict::Stay, Verdict::Stay));
        assert!(matches!(next.at(19), Verdict::Stop(_)));
    }

    #[test]
    fn in_a_drain_the_rest_of_a_request_must_come_within_the_linger_time() {
        let mut head = Looked::new(Protocol::Http);
        (head.draining, head.seen.received) = (true, 5);
        assert_eq!(head.at(0), Verdict::Stay);
        // These are as many bytes as the least rate asks for.
        head.seen.received = 10;
        assert_eq!(head.at(1), Verdict::Stay);
        head.seen.received = 14;
        assert!(matches!(head.at(2), Verdict::Stop(_)));

        let mut body = Looked::new(Protocol::Grpc);
        (body.seen.requests, body.seen.served, body.seen.received, body.seen.awaited) = (2, 2, 100, 1);
        assert_eq!(body.at(0), Verdict::Stay);
        (body.draining, body.seen.asked) = (true, Request::Finish);
        assert_eq!((body.at(1), body.at(9)), (Verdict::Stay, Verdict::Stay), "another call is under way");
        body.seen.requests = 1;
        assert_eq!(body.at(10), Verdict::Stay);
        assert!(matches!(body.at(11), Verdict::Stop(_)));
    }

    #[test]
    fn an_answer_must_be_read_at_the_least_rate() {
        let mut http = Looked::new(Protocol::Http);
        (http.seen.requests, http.seen.served, http.seen.write_blocked) = (1, 1, true);
        assert_eq!(http.at(0), Verdict::Stay);
        http.seen.sent = 50;
        assert_eq!(http.at(10), Verdict::Stay);
        http.seen.sent = 99;
        assert!(matches!(http.at(20), Verdict::Stop(_)));
    }

    #[test]
    fn in_a_drain_grpc_is_told_at_once_and_http_when_it_is_idle() {
        let mut grpc = Looked::new(Protocol::Grpc);
        (grpc.draining, grpc.seen.requests, grpc.seen.received) = (true, 1, 100);
        assert_eq!(grpc.at(0), Verdict::Finish);
        let mut silent = Looked::new(Protocol::Grpc);
        (silent.draining, silent.seen.received) = (true, 3);
        assert_eq!(silent.at(0), Verdict::Stay);
        assert!(matches!(silent.at(1), Verdict::Stop(_)));
        let mut http = Looked::new(Protocol::Http);
        (http.draining, http.seen.requests) = (true, 1);
        assert_eq!(http.at(5), Verdict::Stay);
        http.seen.requests = 0;
        assert_eq!(http.at(6), Verdict::Finish);
    }
}
