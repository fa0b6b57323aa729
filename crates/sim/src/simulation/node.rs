//! The loop of all simulations: it takes virtual time from event to event.

use std::ops::ControlFlow;

use downbeat_core::Time;

/// A simulation for [`run`]. The node knows which of its parts has the next event, and the order of
/// its events at one instant. The loop alone moves the time.
pub trait Node {
    /// An event, as the node tells its events apart.
    type Event;
    /// The reason to end a run that has events left.
    type End;

    /// This many events at one instant mean that a state machine asks to be called again and again.
    const STUCK: u32 = 100_000;

    /// The seed of the run, for the loop's panic.
    fn seed(&self) -> u64;

    /// Takes the next event, with its time. A time that has passed means now. `None`: no event is
    /// left.
    fn poll_event(&mut self) -> Option<(Time, Self::Event)>;

    /// Handles the event that [`Node::poll_event`] returned last. The time never goes back.
    fn handle_event(&mut self, now: Time, event: Self::Event) -> ControlFlow<Self::End>;
}

/// Runs a node from `begin` on, until it has no event left or ends the run. Returns the time of the
/// last event, and the node's reason to end before its events did. Panics, with the seed, if the
/// time does not go on.
pub fn run<N: Node>(node: &mut N, begin: Time) -> (Time, Option<N::End>) {
    let (mut now, mut events) = (begin, 0);
    while let Some((at, event)) = node.poll_event() {
        events = if at > now { 0 } else { events + 1 };
        assert!(events < N::STUCK, "seed {}, {now}: time does not go on", node.seed());
        now = now.max(at);
        if let ControlFlow::Break(end) = node.handle_event(now, event) {
            return (now, Some(end));
        }
    }
    (now, None)
}

#[cfg(test)]
mod tests {
    use downbeat_core::Duration;

    use super::*;

    /// Events at these times, in milliseconds. The node ends the run at an event of 7 ms.
    struct Times(Vec<u64>, Vec<Time>);

    impl Node for Times {
        type Event = u64;
        type End = u64;

        const STUCK: u32 = 4;

        fn seed(&self) -> u64 {
            17
        }

        fn poll_event(&mut self) -> Option<(Time, u64)> {
            let next = (!self.0.is_empty()).then(|| self.0.remove(0))?;
            Some((ms(next), next))
        }

        fn handle_event(&mut self, now: Time, event: u64) -> ControlFlow<u64> {
            self.1.push(now);
            if event == 7 { ControlFlow::Break(event) } else { ControlFlow::Continue(()) }
        }
    }

    fn ms(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn time_goes_on_until_no_event_is_left_or_the_node_ends_the_run() {
        let mut node = Times(vec![1, 3, 2, 5], Vec::new());
        assert_eq!(run(&mut node, ms(2)), (ms(5), None));
        assert_eq!(node.1, [ms(2), ms(3), ms(3), ms(5)], "the time never goes back");
        assert_eq!(run(&mut Times(vec![6, 7, 8], Vec::new()), Time::ZERO), (ms(7), Some(7)));
    }

    #[test]
    #[should_panic(expected = "seed 17, t=3")]
    fn a_node_that_asks_again_and_again_is_found() {
        run(&mut Times(vec![3; 6], Vec::new()), Time::ZERO);
    }
}
