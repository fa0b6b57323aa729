//! Detects clients that ask again only after their answer.

use std::collections::VecDeque;

use super::noise::{Random, Ring};
use crate::time::{Duration, Time};

/// A round lasts until each client has asked this often, on average. Then the load is judged again.
const CIRCLES: u32 = 16;
/// Fewest arrivals of a round.
const SHORTEST_ROUND: u32 = 32;
/// With more clients, the load counts as one that does not wait for answers.
const MOST: u32 = 256;
/// If a round loses more than one request in this many, the load does not wait for answers.
const LOST: u32 = 16;
/// Standstills, times clients, that prove a closed loop: by chance requests stay away so often once
/// in e^16 times.
const STANDSTILLS: u32 = 16;
/// A closed loop also takes at least this many standstills.
const FEWEST_STANDSTILLS: u32 = 4;
/// The mean gap between two arrivals is over this many arrivals.
const GAPS: f64 = 256.0;
/// Number of remembered pauses. Old pauses are forgotten, as pauses change with the behaviour.
const PAUSES: usize = 128;
/// After this time below the ceiling, some clients have left.
const MEMORY: Duration = Duration::from_millis(60_000);

/// Tells whether a model's requests form a closed loop: each of a number of clients waits for its
/// answer before it asks again. In a closed loop the scheduler's decisions change when requests
/// come, and larger batches bring more requests. Examples are a benchmark, and a job that works
/// through a list.
///
/// Two signs show a closed loop. Both are about a ceiling: the most requests that were ever under
/// way.
///
/// - **The ceiling is met again and again**, while no request is lost and clients spend more than
///   half of their time on waiting. Requests that do not wait for answers reach their maximum once
///   in thousands.
/// - **Requests stay away at the ceiling.** Example: 32 clients ask 20,000 times a second, mostly
///   busy with themselves. At most 5 requests are under way. Then the device stands still for 100
///   ms. Only 32 requests gather, not the 2,000 that a load without feedback would send.
///
/// A closed loop stays one until more requests are under way than it has clients, or until many are
/// lost.
#[derive(Clone, Debug, Default)]
pub(super) struct ClosedLoop {
    under_way: u32,
    /// The most requests under way in this round, and how often that many were.
    most: u32,
    hits: u32,
    arrivals: u32,
    lost: u32,
    /// Whether the last round lost many requests.
    loses: bool,
    began: Time,
    /// The most requests under way in the last minute, and when so many were last under way.
    ceiling: u32,
    met: Time,
    /// Standstills since the ceiling rose. In a standstill no request comes, at the ceiling, for as
    /// long as all clients together usually take to ask once.
    standstills: u32,
    last: Time,
    /// Mean time between two arrivals, seconds, and the number of gaps behind it.
    gap: f64,
    gaps: f64,
    /// When requests were answered whose clients have not asked again, the oldest first.
    answered: VecDeque<Time>,
    /// Pauses between an answer and the client's next request, seconds.
    pauses: Ring<PAUSES>,
    clients: Option<u32>,
    /// Whether the driver reports answers at all.
    told: bool,
}

impl ClosedLoop {
    /// Notes that a request came.
    pub fn arrived(&mut self, at: Time) {
        self.under_way = self.under_way.saturating_add(1);
        match self.under_way.cmp(&self.most) {
            std::cmp::Ordering::Greater => (self.most, self.hits) = (self.under_way, 1),
            std::cmp::Ordering::Equal => self.hits += 1,
            std::cmp::Ordering::Less => {}
        }
        if self.under_way >= self.ceiling {
            self.met = at;
        }
        if self.under_way > self.ceiling {
            (self.ceiling, self.standstills, self.clients) = (self.under_way, 0, None);
        }
        if let Some(answered) = self.answered.pop_front() {
            self.pauses.add(at.since(answered).as_secs_f64());
        }
        if self.last > Time::ZERO {
            self.gaps = (self.gaps + 1.0).min(GAPS);
            self.gap += (at.since(self.last).as_secs_f64() - self.gap) / self.gaps;
        }
        self.last = at;
        self.arrivals += 1;
        if self.arrivals >= self.most.min(MOST).saturating_mul(CIRCLES).max(SHORTEST_ROUND) {
            self.judge(at);
        }
    }

    /// Notes that requests were answered. A lost request counts as answered too.
    pub fn answered(&mut self, at: Time, requests: u32, lost: bool) {
        self.told = true;
        self.lost += if lost { requests } else { 0 };
        if self.under_way == self.ceiling && self.gaps > 0.0 {
            self.stood(at.since(self.last));
        }
        for _ in 0..requests.min(self.under_way) {
            self.answered.push_back(at);
        }
        self.under_way = self.under_way.saturating_sub(requests);
        self.forget_clients(MOST);
    }

    /// Notes that no request came for this long, at the ceiling.
    fn stood(&mut self, time: Duration) {
        if time.as_secs_f64() < self.gap * f64::from(self.ceiling) || self.ceiling > MOST {
            return;
        }
        self.standstills = self.standstills.saturating_add(1);
        let needed = STANDSTILLS.div_ceil(self.ceiling.max(1)).max(FEWEST_STANDSTILLS);
        if self.standstills >= needed && !self.loses {
            self.clients = Some(self.ceiling);
        }
    }

    /// The number of clients, if they wait for answers.
    pub fn clients(&self) -> Option<u32> {
        self.clients
    }

    /// Whether the driver reports answers. Without these reports no load looks like a closed loop.
    pub fn is_told(&self) -> bool {
        self.told
    }

    /// A client's pause before it asks again, drawn from the measured pauses. `hopeful`: a quick
    /// pause, as if the client had the machine to itself. If the device waits for clients, they are
    /// quick.
    pub fn pause(&self, random: &mut Random, hopeful: bool) -> Duration {
        let draws = if hopeful { 4 } else { 1 };
        let drawn = (0..draws).filter_map(|_| self.pauses.draw(random)).min_by(f64::total_cmp);
        Duration::from_secs_f64(drawn.unwrap_or(0.0))
    }

    fn judge(&mut self, now: Time) {
        let circle = now.since(self.began).as_secs_f64() * f64::from(self.most) / f64::from(self.arrivals.max(1));
        let at_ceiling = self.hits >= self.arrivals / (2 * self.most.max(1)) && self.most <= MOST;
        let waits = self.pauses.mean() * 2.0 < circle;
        self.loses = self.lost > self.arrivals / LOST;
        if at_ceiling && waits && self.lost == 0 {
            self.clients = Some(self.most);
            self.lower(self.most, now);
        } else if self.loses {
            self.clients = None;
        }
        if now.since(self.met) > MEMORY {
            self.clients = self.clients.map(|_| self.most);
            self.lower(self.most, now);
        }
        (self.most, self.hits, self.arrivals, self.lost, self.began) = (0, 0, 0, 0, now);
    }

    /// Lowers the ceiling: there are no more clients than this.
    fn lower(&mut self, ceiling: u32, now: Time) {
        if ceiling < self.ceiling {
            (self.ceiling, self.met, self.standstills) = (ceiling, now, 0);
            self.forget_clients(ceiling.saturating_sub(self.under_way));
        }
    }

    /// Keeps this many of the last answered clients: the others have left.
    fn forget_clients(&mut self, kept: u32) {
        let left = self.answered.len().saturating_sub(kept as usize);
        self.answered.drain(..left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(nanos: u64) -> Time {
        Time::from_nanos(nanos)
    }

    /// The judgement on `clients`, or on requests that come by chance, with a device whose batches
    /// are half of the requests under way.
    fn judged(clients: Option<u32>) -> Option<u32> {
        let (mut judged, mut random) = (ClosedLoop::default(), Random(7));
        let (mut now, mut arrivals, mut waiting) = (0, 0, 0);
        while arrivals < 4_096 {
            now += 1_000_000;
            judged.answered(at(now), waiting, false);
            let coming = match clients {
                Some(clients) if arrivals == 0 => clients,
                Some(_) => waiting,
                // As many requests in the mean, but with random variation.
                None => (0..64).filter(|_| random.even() < 0.25).count() as u32,
            };
            (0..coming).for_each(|i| judged.arrived(at(now + 1_000 * u64::from(i))));
            arrivals += coming;
            waiting = judged.under_way.div_ceil(2);
        }
        judged.clients()
    }

    #[test]
    fn waiting_clients_are_told_from_random_requests() {
        assert_eq!([1, 2, 7, 32, 200].map(|clients| judged(Some(clients))), [1, 2, 7, 32, 200].map(Some));
        assert_eq!(judged(None), None);
    }

    #[test]
    fn who_thinks_for_longer_than_waits_is_no_closed_loop() {
        let mut judged = ClosedLoop::default();
        for round in 0..2_048 {
            judged.arrived(at(round * 1_000_000));
            judged.answered(at(round * 1_000_000 + 400_000), 1, false);
        }
        assert_eq!(judged.clients(), None);
    }

    #[test]
    fn where_requests_are_lost_the_load_is_taken_for_one_that_goes_on() {
        let mut judged = ClosedLoop::default();
        for round in 0..4_096 {
            judged.arrived(at(round * 1_000_000));
            judged.answered(at(round * 1_000_000 + 990_000), 1, round % 10 == 0);
        }
        assert_eq!(judged.clients(), None);
    }

    /// For 50 ms each client asks once a millisecond, and the device answers at once. Then it
    /// stands still for 20 ms. This happens `standstills` times.
    fn with_standstills(clients: u64, standstills: u64) -> ClosedLoop {
        let (mut judged, mut now) = (ClosedLoop::default(), 0);
        for _ in 0..standstills {
            for number in 0..50 * clients {
                let came = now + number * 1_000_000 / clients;
                judged.arrived(at(came));
                judged.answered(at(came + 100_000 / clients), 1, false);
            }
            now += 50_000_000;
            (0..clients).for_each(|client| judged.arrived(at(now + client * 1_000_000 / clients)));
            now += 20_000_000;
            judged.answered(at(now), clients as u32, false);
            now += 900_000;
        }
        judged
    }

    #[test]
    fn busy_clients_show_that_they_wait_when_the_device_stands_still() {
        for clients in [1, 2, 5, 32, 256] {
            assert_eq!(with_standstills(clients, 2).clients(), None, "{clients}: two may be chance");
            let mut judged = with_standstills(clients, 20);
            assert_eq!(judged.clients(), Some(clients as u32));
            (0..=clients).for_each(|_| judged.arrived(judged.last));
            assert_eq!(judged.clients(), None, "one more came than there were clients");
        }
    }

    /// Twenty requests at once every 40 ms, which take 10 ms, and now and then 70. The next
    /// requests come all the same.
    #[test]
    fn bursts_that_come_by_the_clock_are_no_closed_loop() {
        let (mut judged, mut ends) = (ClosedLoop::default(), VecDeque::new());
        for burst in 0..1_000 {
            let now = burst * 40_000_000;
            while let Some(end) = ends.pop_front_if(|end| *end <= now) {
                judged.answered(at(end), 20, false);
            }
            (0..20).for_each(|_| judged.arrived(at(now)));
            ends.push_back(now + if burst % 50 == 49 { 70_000_000 } else { 10_000_000 });
            assert_eq!(judged.clients(), None, "after {burst} bursts");
        }
    }

    /// 200 of 256 clients leave, and the others are busy with themselves. After a minute only the
    /// others count.
    #[test]
    fn clients_that_have_left_are_forgotten() {
        let mut judged = with_standstills(256, 20);
        let mut now = judged.last.as_nanos() + 100_000_000;
        for _ in 0..70_000 {
            (0..2).for_each(|_| judged.arrived(at(now)));
            judged.answered(at(now + 100_000), 2, false);
            now += 1_000_000;
        }
        assert_eq!((judged.clients(), judged.ceiling), (Some(2), 2));
    }
}
