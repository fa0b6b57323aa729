//! Elects the leader: one scheduler's view of the others, and the instant at which it takes over.
//!
//! All schedulers have the same list. A closed connection is evidence that the leader is dead: the
//! live spare of the lowest rank takes the next epoch at once. Silence is weaker evidence. The
//! leader sends the others a heartbeat, and on a busy machine heartbeats are late. A spare waits
//! [`TIMES_LATE`] times as long as heartbeats were late in the last minutes, and
//! `takeover_after` at least. It waits so long again for each live spare before it, so that spares do
//! not all take over at once. Two spares that cannot hear each other may both take over. The two epochs then differ in rank,
//! and everyone obeys the lower rank.
//!
//! A scheduler that stood still itself cannot know that the others were silent meanwhile, so this
//! time does not count as their silence. The lead may change again and again. Example: two schedulers cannot hear
//! each other, and a third hears both. After a few changes each scheduler waits longer before it
//! takes over, by up to a second.

use std::collections::VecDeque;

use crate::epoch::Epoch;
use downbeat_core::time::{Duration, Time};

/// Changes of the lead within [`CALM`] before patience grows.
const TOLERATED_CHANGES: u32 = 3;

/// After this time without a change of the lead, patience starts from zero again.
const CALM: Duration = Duration::from_millis(2_000);

/// The most that earlier takeovers may delay a takeover.
const MOST_PATIENCE: Duration = Duration::from_millis(1_000);

/// How long a spare waits before it asks a store again that had no epoch, in `takeover_after`.
const ASK_AGAIN: u64 = 10;

/// The leader's silence is evidence once it is this many times as long as the longest gap between
/// its frames lately.
const TIMES_LATE: u64 = 3;
/// In this time a remembered gap shrinks to about a third.
///
/// Take a machine of 30 busy processes a core. Few of its heartbeats are more than 3 ms late, and one in
/// some minutes is 40 ms late. With 5 s the lead changed in two of three bursts of requests. With 30 s
/// the lead changed once in ten minutes.
const FORGETS_IN: Duration = Duration::from_millis(300_000);
/// Until a spare has heard a leader for `first_wait`, it waits this many times `takeover_after`. At
/// the start it waits so long for each rank before its own.
const TIMES_NEW: u64 = 10;

/// One scheduler's view of the lead.
#[derive(Debug)]
pub(super) struct Election {
    rank: u32,
    takeover_after: Duration,
    /// How long a leader that others report may take to connect.
    first_wait: Duration,
    epochs_are_allotted: bool,
    /// The highest epoch that this scheduler has heard of.
    heard: Epoch,
    /// The last epoch in which this scheduler or another one has led. Reports of others are held
    /// against this epoch, so that any number of reports raises `heard` by one step in each lead.
    led: Epoch,
    /// Whether a frontend or a backend has followed this scheduler's last lead.
    is_followed: bool,
    /// When another scheduler's lead last raised `led`: at most once in `first_wait`.
    led_since: Option<Time>,
    state: State,
    /// When the leader of `heard` was last heard, or since when there is no leader.
    leader_heard: Time,
    /// Whether the node that leads as `heard` is connected and has confirmed its lead.
    leader_is_up: bool,
    /// By rank: when each other scheduler was last heard; `None`: not connected.
    others: Vec<Option<Time>>,
    /// When this scheduler came back from a pause so long that others may have given it up.
    back: Option<Time>,
    /// The longest gap between frames of the leader, without this scheduler's own pauses. The value
    /// shrinks as time goes by.
    gap: Duration,
    /// Since when the leader is connected.
    up_since: Time,
    /// Whether the leader's connection has ended.
    is_lost: bool,
    /// The pauses of this scheduler that do not count as the leader's silence.
    forgiven: Duration,
    /// Changes of the lead without a calm between them, and the instant of the last change.
    changes: u32,
    changed_at: Time,
    events: VecDeque<ElectionEvent>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Spare,
    /// This scheduler has asked the store for an epoch, or will ask again at `again`.
    Asking {
        again: Option<Time>,
    },
    Leads(Epoch),
}

/// A result of the election.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ElectionEvent {
    /// This scheduler leads.
    Leads(Epoch),
    /// Another scheduler leads, or led.
    StandsBy(Epoch),
    /// The store must allot an epoch above this number.
    WantEpoch(u64),
}

impl Election {
    /// The election of the scheduler of `rank` among `schedulers`. A new election waits for a
    /// leader for `first_wait`, and longer for each rank before its own: how late messages are is
    /// not known yet.
    pub fn new(
        (rank, schedulers): (u32, u32),
        takeover_after: Duration,
        epochs_are_allotted: bool,
        first_wait: Duration,
        now: Time,
    ) -> Self {
        let first_wait = if schedulers > 1 { first_wait } else { Duration::ZERO };
        let half = Duration::from_nanos(first_wait.as_nanos() / 2);
        let turn = takeover_after.saturating_mul(TIMES_NEW).min(half).max(takeover_after);
        let turn = if schedulers > 1 { turn.saturating_mul(rank.into()) } else { Duration::ZERO };
        Election {
            rank,
            takeover_after,
            first_wait,
            epochs_are_allotted,
            heard: Epoch::NONE,
            led: Epoch::NONE,
            is_followed: false,
            led_since: None,
            state: State::Spare,
            leader_heard: now + first_wait + turn,
            leader_is_up: false,
            others: vec![None; schedulers.max(rank.saturating_add(1)).min(MOST_SCHEDULERS) as usize],
            back: None,
            gap: Duration::ZERO,
            up_since: now,
            is_lost: false,
            forgiven: Duration::ZERO,
            changes: 0,
            changed_at: now,
            events: VecDeque::new(),
        }
    }

    /// Notes that this scheduler itself stood still until now. Call this before handling any other
    /// event. This time does not count as the silence of others. Once pauses of `first_wait` have
    /// been forgiven they count: a scheduler that always stands still must take over, too.
    pub fn handle_pause(&mut self, now: Time, stood_still: Duration) {
        if stood_still.saturating_mul(2) > self.first_wait {
            self.back = Some(now);
        }
        if self.forgiven >= self.first_wait {
            return;
        }
        self.forgiven += stood_still;
        let moved = |heard: Time| heard.max((heard + stood_still).min(now));
        if !self.is_lost {
            self.leader_heard = moved(self.leader_heard);
        }
        self.others.iter_mut().flatten().for_each(|heard| *heard = moved(*heard));
    }

    /// The epoch in which this scheduler leads.
    pub fn leads(&self) -> Option<Epoch> {
        match self.state {
            State::Leads(epoch) => Some(epoch),
            _ => None,
        }
    }

    /// Whether this scheduler leads, or hears a leader.
    pub fn has_leader(&self) -> bool {
        self.leader_is_up || self.leads().is_some()
    }

    /// The standing to tell other schedulers: the highest epoch heard of, and whether this
    /// scheduler leads.
    pub fn standing(&self) -> (Epoch, bool) {
        (self.heard, self.leads().is_some())
    }

    /// Notes that another scheduler sent any frame.
    pub fn handle_heard(&mut self, now: Time, rank: u32) {
        if let Some(Some(at)) = self.others.get_mut(rank as usize) {
            *at = now;
        }
        if self.leader_is_up && rank == self.heard.rank {
            let gap = now.since(self.leader_heard);
            let forgotten = u128::from(self.gap.as_nanos()) * u128::from(gap.min(FORGETS_IN).as_nanos());
            let forgotten = Duration::from_nanos((forgotten / u128::from(FORGETS_IN.as_nanos())) as u64);
            self.gap = self.gap.saturating_sub(forgotten).max(gap);
            self.leader_was_heard(now);
        }
    }

    /// Another scheduler has connected.
    pub fn handle_up(&mut self, now: Time, rank: u32) {
        if let Some(other) = self.others.get_mut(rank as usize) {
            *other = Some(now);
        }
        if rank == self.heard.rank {
            // This may be another process of the leader's rank, until it confirms its lead.
            self.leader_is_up = false;
        }
    }

    /// Another scheduler is disconnected.
    pub fn handle_lost(&mut self, now: Time, rank: u32) {
        if let Some(other) = self.others.get_mut(rank as usize) {
            *other = None;
        }
        if rank == self.heard.rank && std::mem::take(&mut self.leader_is_up) {
            if self.back.is_some_and(|back| now < back + self.first_wait) {
                // This scheduler itself was silent, and the leader has given it up.
                self.leader_heard = now + self.first_wait;
                return;
            }
            self.is_lost = true;
            self.leader_heard = self.leader_heard.min(now - self.silence());
        }
    }

    /// A frontend or a backend follows this scheduler's lead.
    pub fn handle_followed(&mut self) {
        self.is_followed = true;
    }

    /// Another node has heard of an epoch. `scheduler`: the rank of a scheduler that reports it,
    /// and whether that scheduler leads. Returns false if takeovers cannot have led to this
    /// epoch: the report has no effect, and the node must be given up.
    ///
    /// A scheduler that no frontend or backend follows may know too little. If a report is
    /// implausible, such a scheduler goes up to the greatest plausible epoch. Followers of a greater
    /// epoch report that epoch again in the scheduler's next lead.
    pub fn handle_standing(&mut self, now: Time, epoch: Epoch, scheduler: Option<(u32, bool)>) -> bool {
        let most = self.led.plausible(1);
        let is_plausible = epoch.number <= most;
        if !epoch.is_possible() || (!is_plausible && self.leads().is_some() && self.is_followed) {
            return false;
        }
        let leads = epoch.number > 0 && is_plausible && scheduler == Some((epoch.rank, true));
        let epoch = if is_plausible { epoch } else { Epoch { number: most, rank: u32::MAX } };
        if leads && self.led_since.is_none_or(|since| since + self.first_wait <= now) {
            (self.led, self.led_since) = (self.led.max(epoch), Some(now));
        }
        if leads && epoch >= self.heard && !(self.leader_is_up && epoch == self.heard) {
            self.up_since = now;
        }
        if epoch > self.heard {
            self.heard = epoch;
            self.leader_is_up = leads;
            self.leader_was_heard(if leads { now } else { now + self.first_wait });
            self.count_change(now);
            self.state = State::Spare;
            self.events.push_back(ElectionEvent::StandsBy(epoch));
        } else if epoch == self.heard && leads {
            self.leader_is_up = true;
            self.leader_was_heard(now);
        } else if scheduler.is_some_and(|(rank, _)| rank == self.heard.rank) {
            // The scheduler that led as `heard` no longer does: another process has its rank now.
            self.leader_is_up = false;
        }
        true
    }

    /// A frontend or a backend has followed another process in this epoch. A scheduler that leads
    /// in it stands by, and takes the next epoch unless another scheduler does.
    pub fn handle_taken(&mut self, now: Time, epoch: Epoch) {
        if self.leads() != Some(epoch) {
            return;
        }
        self.state = State::Spare;
        self.leader_is_up = false;
        self.leader_was_heard(now + self.first_wait);
        self.count_change(now);
        self.events.push_back(ElectionEvent::StandsBy(epoch));
    }

    /// Handles the store's answer.
    pub fn handle_epoch(&mut self, now: Time, number: Option<u64>) {
        if self.state != (State::Asking { again: None }) {
            return;
        }
        match number {
            Some(number) if number > self.heard.number => self.lead(now, number),
            _ => self.state = State::Asking { again: Some(now + self.takeover_after.saturating_mul(ASK_AGAIN)) },
        }
    }

    /// Does everything that is due.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.poll_timeout().is_none_or(|due| due > now) {
            return;
        }
        if self.epochs_are_allotted {
            self.state = State::Asking { again: None };
            self.events.push_back(ElectionEvent::WantEpoch(self.heard.number));
        } else {
            self.lead(now, self.heard.number.saturating_add(1));
        }
    }

    /// The next result of the election.
    pub fn poll_event(&mut self) -> Option<ElectionEvent> {
        self.events.pop_front()
    }

    /// When this scheduler takes over, or asks the store for an epoch, unless it hears the leader
    /// first.
    pub fn poll_timeout(&self) -> Option<Time> {
        match self.state {
            State::Leads(_) | State::Asking { again: None } => None,
            State::Asking { again } => again,
            State::Spare => {
                let turns = 1 + self.live_before();
                Some(self.leader_heard + self.silence().saturating_mul(turns) + self.patience())
            }
        }
    }

    /// The silence of the leader after which this scheduler takes over.
    fn silence(&self) -> Duration {
        if !self.leader_is_up {
            return self.takeover_after;
        }
        let is_new = self.leader_heard < self.up_since + self.first_wait;
        let unknown = if is_new { self.takeover_after.saturating_mul(TIMES_NEW) } else { Duration::ZERO };
        let most = Duration::from_nanos(self.first_wait.as_nanos() / 2);
        self.gap.saturating_mul(TIMES_LATE).max(unknown).min(most).max(self.takeover_after)
    }

    /// Spares of lower rank that were heard since the leader was last heard.
    fn live_before(&self) -> u64 {
        let live = |(rank, heard): (u32, &Option<Time>)| {
            rank != self.heard.rank && heard.is_some_and(|heard| heard >= self.leader_heard)
        };
        (0..self.rank).zip(&self.others).filter(|other| live(*other)).count() as u64
    }

    /// The delay of a takeover because leads have changed too often.
    fn patience(&self) -> Duration {
        match self.changes.saturating_sub(TOLERATED_CHANGES) {
            0 => Duration::ZERO,
            more => self.takeover_after.saturating_mul(1 << more.min(20)).min(MOST_PATIENCE),
        }
    }

    fn count_change(&mut self, now: Time) {
        self.changes = if now.since(self.changed_at) > CALM { 1 } else { self.changes.saturating_add(1) };
        self.changed_at = now;
    }

    fn lead(&mut self, now: Time, number: u64) {
        let epoch = Epoch { number, rank: self.rank };
        if epoch <= self.heard {
            // The store has allotted a number that others have led in meanwhile.
            self.leader_heard = now;
            return;
        }
        (self.heard, self.led, self.is_followed) = (epoch, epoch, false);
        self.leader_is_up = false;
        self.count_change(now);
        self.state = State::Leads(epoch);
        self.events.push_back(ElectionEvent::Leads(epoch));
    }

    fn leader_was_heard(&mut self, now: Time) {
        self.leader_heard = now;
        (self.is_lost, self.forgiven) = (false, Duration::ZERO);
        if let State::Asking { .. } = self.state {
            self.state = State::Spare;
        }
    }
}

/// A bound on the number of schedulers, above any real cluster.
pub(super) const MOST_SCHEDULERS: u32 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const TAKEOVER: Duration = Duration::from_millis(3);
    const FIRST_WAIT: Duration = Duration::from_millis(50);

    fn ms(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    fn epoch(number: u64, rank: u32) -> Epoch {
        Epoch { number, rank }
    }

    /// A spare of this rank among three. Up to 100 ms it hears the leader of `1/0` and all others,
    /// every half of a millisecond.
    fn spare(rank: u32, epochs_are_allotted: bool) -> Election {
        spare_that_hears(rank, epochs_are_allotted, (0..=200).map(|half| Duration::from_micros(500 * half)))
    }

    /// [`spare`], which hears the others at these times, and at last at 100 ms.
    fn spare_that_hears(rank: u32, epochs_are_allotted: bool, times: impl Iterator<Item = Duration>) -> Election {
        let mut election = Election::new((rank, 3), TAKEOVER, epochs_are_allotted, FIRST_WAIT, Time::ZERO);
        let others = || (0..3).filter(|other| *other != rank);
        others().for_each(|other| election.handle_up(Time::ZERO, other));
        election.handle_standing(Time::ZERO, epoch(1, 0), Some((0, true)));
        assert_eq!(election.poll_event(), Some(ElectionEvent::StandsBy(epoch(1, 0))));
        for time in times {
            others().for_each(|other| election.handle_heard(Time::ZERO + time, other));
        }
        others().for_each(|other| election.handle_heard(ms(100), other));
        election
    }

    /// On a busy machine, heartbeats of a live leader are late again and again.
    #[test]
    fn silence_is_evidence_once_it_is_longer_than_usual() {
        // Every tenth of 100 heartbeats is 5 ms late.
        let mut at = Duration::ZERO;
        let times = (0..100).map(|n| {
            at += if n % 10 == 9 { Duration::from_micros(5_500) } else { Duration::from_micros(500) };
            at
        });
        let mut busy = spare_that_hears(1, false, times.collect::<Vec<_>>().into_iter());
        let (took_over, event) = pass(&mut busy, 100, &[2]);
        assert_eq!(event, Some(ElectionEvent::Leads(epoch(2, 1))));
        assert!((116..=117).contains(&took_over), "three times 5.5 ms: {took_over}");
        // How late the heartbeats of a new leader are is not known yet: half of `first_wait`.
        let mut new = spare(1, false);
        new.handle_standing(ms(100), epoch(2, 0), Some((0, true)));
        new.poll_event();
        assert_eq!(pass(&mut new, 100, &[2]), (125, Some(ElectionEvent::Leads(epoch(3, 1)))));
    }

    #[test]
    fn a_late_heartbeat_is_forgotten() {
        let late = (0..20_000).map(|n| Duration::from_micros(if n == 0 { 8_000 } else { 8_000 + 500 * n }));
        let mut election = spare_that_hears(1, false, late.take_while(|at| *at < Duration::from_millis(100)));
        assert_eq!(pass(&mut election, 100, &[2]).0, 124, "three times 8 ms, less a little");
        let mut calm = spare(1, false);
        (0..1_000).for_each(|n| calm.handle_heard(ms(108) + Duration::from_millis(10 * n), 0));
        (0..1_000_000).for_each(|n| calm.handle_heard(ms(10_098 + n), 0));
        let last = 10_098 + 999_999;
        assert_eq!(pass(&mut calm, last, &[]).0, last + 3);
    }

    /// The end of a connection is evidence on any machine.
    #[test]
    fn a_closed_connection_is_evidence_at_once_on_a_busy_machine_too() {
        let mut busy = spare_that_hears(1, false, (0..10).map(|n| Duration::from_millis(10 * n)));
        busy.handle_lost(ms(101), 0);
        busy.handle_timeout(ms(101));
        assert_eq!(busy.poll_event(), Some(ElectionEvent::Leads(epoch(2, 1))));
    }

    /// A scheduler that stands still again and again does not take this for silence, but takes over
    /// in the end.
    #[test]
    fn own_pauses_are_forgiven_for_a_while() {
        let mut election = spare(1, false);
        for n in 1..20 {
            let now = ms(100 + 10 * n);
            election.handle_pause(now, Duration::from_millis(10));
            election.handle_timeout(now);
            let took_over = election.poll_event().is_some();
            assert_eq!(took_over, n == 6, "{now:?}: 50 ms are forgiven");
            if took_over {
                return;
            }
        }
    }

    /// Lets time pass in steps of a millisecond, in which these ranks are heard, until the election
    /// has a result.
    fn pass(election: &mut Election, from: u64, heard: &[u32]) -> (u64, Option<ElectionEvent>) {
        for at in from + 1..from + 200 {
            heard.iter().for_each(|rank| election.handle_heard(ms(at), *rank));
            election.handle_timeout(ms(at));
            if let Some(event) = election.poll_event() {
                return (at, Some(event));
            }
        }
        (from + 200, None)
    }

    #[test]
    fn at_the_start_a_leader_is_waited_for_in_the_order_of_ranks() {
        for rank in 0..3 {
            let mut election = Election::new((rank, 3), TAKEOVER, false, FIRST_WAIT, Time::ZERO);
            let due = 50 + 3 + 25 * u64::from(rank);
            assert_eq!(pass(&mut election, 0, &[]), (due, Some(ElectionEvent::Leads(epoch(1, rank)))));
        }
        let mut alone = Election::new((0, 1), TAKEOVER, false, FIRST_WAIT, Time::ZERO);
        assert_eq!(pass(&mut alone, 0, &[]).0, 3);
    }

    #[test]
    fn a_leader_that_is_heard_is_left_alone() {
        assert_eq!(pass(&mut spare(1, false), 100, &[0, 2]).1, None);
    }

    #[test]
    fn the_first_live_spare_follows_a_silent_leader_in_three_heartbeats() {
        assert_eq!(pass(&mut spare(1, false), 100, &[2]), (103, Some(ElectionEvent::Leads(epoch(2, 1)))));
        assert_eq!(pass(&mut spare(2, false), 100, &[1]), (106, Some(ElectionEvent::Leads(epoch(2, 2)))));
        let mut alone = spare(2, false);
        alone.handle_lost(ms(100), 1);
        assert_eq!(
            pass(&mut alone, 100, &[]),
            (103, Some(ElectionEvent::Leads(epoch(2, 2)))),
            "the other spare is dead"
        );
    }

    #[test]
    fn the_end_of_the_leaders_connection_is_as_good_as_silence() {
        let mut first = spare(1, false);
        first.handle_lost(ms(101), 0);
        first.handle_timeout(ms(101));
        assert_eq!(first.poll_event(), Some(ElectionEvent::Leads(epoch(2, 1))));
    }

    #[test]
    fn who_was_stopped_itself_listens_once_more() {
        let mut election = spare(1, false);
        election.handle_pause(ms(140), Duration::from_millis(40));
        election.handle_timeout(ms(140));
        assert_eq!(election.poll_event(), None, "what the leader said meanwhile may be still to be read");
        assert_eq!(pass(&mut election, 140, &[]), (143, Some(ElectionEvent::Leads(epoch(2, 1)))));
    }

    /// The leader has given this scheduler up for its silence. The end of the connection says
    /// nothing about the leader.
    #[test]
    fn a_stopped_spare_does_not_take_a_lost_connection_for_silence() {
        let mut election = spare(1, false);
        election.handle_pause(ms(1_000), Duration::from_millis(900));
        election.handle_lost(ms(1_000), 0);
        let (at, event) = pass(&mut election, 1_000, &[]);
        assert_eq!((at, event), (1_053, Some(ElectionEvent::Leads(epoch(2, 1)))));
    }

    #[test]
    fn a_leader_steps_down_for_a_higher_epoch_and_for_a_lower_rank() {
        let mut leader = spare(1, false);
        pass(&mut leader, 100, &[]);
        leader.handle_standing(ms(104), epoch(2, 2), Some((2, true)));
        assert_eq!(
            (leader.poll_event(), leader.leads()),
            (None, Some(epoch(2, 1))),
            "a higher rank of the same number"
        );
        leader.handle_standing(ms(104), epoch(2, 0), Some((0, true)));
        assert_eq!((leader.poll_event(), leader.leads()), (Some(ElectionEvent::StandsBy(epoch(2, 0))), None));
    }

    /// Another process, which knows nothing, has the leader's rank.
    #[test]
    fn a_leader_that_was_started_anew_leads_no_more() {
        let mut election = spare(1, false);
        election.handle_up(ms(101), 0);
        election.handle_standing(ms(101), Epoch::NONE, Some((0, false)));
        assert_eq!(pass(&mut election, 101, &[0]), (103, Some(ElectionEvent::Leads(epoch(2, 1)))));
    }

    #[test]
    fn a_leader_that_others_have_heard_of_has_time_to_get_here() {
        let mut election = Election::new((0, 2), TAKEOVER, false, FIRST_WAIT, Time::ZERO);
        election.handle_standing(ms(10), epoch(7, 1), None);
        assert_eq!(election.poll_event(), Some(ElectionEvent::StandsBy(epoch(7, 1))));
        assert_eq!(pass(&mut election, 10, &[]), (63, Some(ElectionEvent::Leads(epoch(8, 0)))));
    }

    #[test]
    fn with_a_store_nobody_leads_before_it_has_said_so() {
        let mut election = spare(1, true);
        assert_eq!(pass(&mut election, 100, &[]), (103, Some(ElectionEvent::WantEpoch(1))));
        election.handle_epoch(ms(104), None);
        assert_eq!(pass(&mut election, 104, &[]), (134, Some(ElectionEvent::WantEpoch(1))), "it is asked again, later");
        // The leader is heard again, so the store's answer comes too late.
        election.handle_heard(ms(135), 0);
        election.handle_epoch(ms(136), Some(2));
        assert_eq!((election.poll_event(), election.leads()), (None, None));
        assert_eq!(pass(&mut election, 136, &[]).1, Some(ElectionEvent::WantEpoch(1)));
        election.handle_epoch(ms(150), Some(5));
        assert_eq!(election.poll_event(), Some(ElectionEvent::Leads(epoch(5, 1))));
    }

    /// Two schedulers cannot hear each other, and a third hears both. Without patience the lead
    /// would change every three milliseconds.
    #[test]
    fn leads_that_change_all_the_time_change_more_and_more_slowly() {
        let (mut election, mut at, mut leads) = (spare(1, false), 100, 0);
        while at < 2_100 {
            let (next, event) = pass(&mut election, at, &[]);
            at = next;
            if let Some(ElectionEvent::Leads(mine)) = event {
                leads += 1;
                election.handle_standing(ms(at), epoch(mine.number + 1, 0), Some((0, true)));
                assert!(matches!(election.poll_event(), Some(ElectionEvent::StandsBy(_))));
            }
        }
        assert!((3..12).contains(&leads), "{leads}");
    }

    /// No report of a great number ends service. A thousand reports in a row count as one.
    #[test]
    fn reports_raise_the_epoch_by_one_step_in_each_lead() {
        let mut election = spare(1, false);
        assert!(!election.handle_standing(ms(100), epoch(u64::MAX, 0), None));
        assert!(!election.handle_standing(ms(100), epoch(u64::MAX, 0), Some((0, true))));
        assert_eq!(election.standing(), (epoch(1, 0), false));
        for _ in 0..1_000 {
            assert!(election.handle_standing(ms(100), epoch(1 << 62, 0), Some((0, true))), "a spare goes by steps");
        }
        let raised = 1 + crate::epoch::STEP;
        assert_eq!(election.standing().0.number, raised);
        election.poll_event();
        assert_eq!(pass(&mut election, 100, &[]).1, Some(ElectionEvent::Leads(epoch(raised + 1, 1))));
        election.handle_followed();
        assert!(!election.handle_standing(ms(300), epoch(1 << 62, 0), None), "a leader goes on");
        assert_eq!(election.leads(), Some(epoch(raised + 1, 1)));
    }

    /// A fresh scheduler reaches any epoch that its followers have reached.
    #[test]
    fn a_leader_that_nobody_follows_goes_up_to_its_followers() {
        let mut election = Election::new((0, 1), TAKEOVER, false, FIRST_WAIT, Time::ZERO);
        let (theirs, mut at) = (5 * crate::epoch::STEP + 7, 0);
        for _ in 0..8 {
            let (next, event) = pass(&mut election, at, &[]);
            let Some(ElectionEvent::Leads(mine)) = event else { panic!("{event:?}") };
            if mine.number > theirs {
                assert!(mine.number <= theirs + crate::epoch::STEP);
                return;
            }
            // So long after the last change of the lead, patience begins anew.
            at = next + 2_500;
            assert!(election.handle_standing(ms(at), epoch(theirs, 0), None));
            election.poll_event();
        }
        panic!("it never got there: {election:?}");
    }

    /// Followers of a process that had this rank before do not follow this one in the same epoch.
    #[test]
    fn a_taken_epoch_is_followed_by_the_next() {
        let mut election = Election::new((0, 1), TAKEOVER, false, FIRST_WAIT, Time::ZERO);
        assert_eq!(pass(&mut election, 0, &[]).1, Some(ElectionEvent::Leads(epoch(1, 0))));
        election.handle_taken(ms(10), epoch(7, 0));
        assert_eq!(election.poll_event(), None, "of another epoch");
        election.handle_taken(ms(10), epoch(1, 0));
        assert_eq!((election.poll_event(), election.leads()), (Some(ElectionEvent::StandsBy(epoch(1, 0))), None));
        assert_eq!(pass(&mut election, 10, &[]).1, Some(ElectionEvent::Leads(epoch(2, 0))));
    }
}
