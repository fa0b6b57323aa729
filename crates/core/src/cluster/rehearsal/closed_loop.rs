//! Clients that ask again once they were answered.

use std::collections::VecDeque;

use super::noise::{Random, Ring};
use crate::time::{Duration, Time};

/// A round lasts until each client has asked so often, in the mean: then the load is judged anew.
const CIRCLES: u32 = 16;
/// Arrivals of a round, at least.
const SHORTEST_ROUND: u32 = 32;
/// More clients are taken for a load that waits for nobody.
const MOST: u32 = 256;
/// A round in which more than one request in so many was lost says that the load goes on.
const LOST: u32 = 16;
/// Standstills, times clients, that show a closed loop: by chance requests stay away so often once in e^16 times.
const STANDSTILLS: u32 = 16;
/// And so many standstills at least.
const FEWEST_STANDSTILLS: u32 = 4;
/// Arrivals over which the mean gap between two of them goes.
const GAPS: f64 = 256.0;
/// Pauses that are remembered: they change with what is done.
const PAUSES: usize = 128;
/// After so long below the ceiling, clients have left.
const MEMORY: Duration = Duration::from_millis(60_000);

/// Whether a model's requests come from so many clients that each waits for its answer before it asks again (a closed loop): then what is decided
/// changes when they come, and larger batches bring more of them. A benchmark does so, and a job that works through a list.
///
/// Two things show it. Both are about a ceiling: the most requests that were ever under way.
///
/// - **The ceiling is met again and again**, while none is lost and clients spend less than half of their time on anything but waiting. Requests that
///   wait for nobody reach their most once in thousands.
/// - **Requests stay away at the ceiling.** Example: 32 clients ask 20,000 times a second, mostly busy with themselves, and at most 5 requests are under way. Once
///   the device stands still for 100 ms, 32 are, and not the 2,000 that a load without feedback would send.
///
/// A load that was seen to be a closed loop stays one until more requests are under way than it has clients, or many are lost.
#[derive(Clone, Debug, Default)]
pub(super) struct ClosedLoop {
    under_way: u32,
    /// The most that were under way in this round, and how often.
    most: u32,
    hits: u32,
    arrivals: u32,
    lost: u32,
    /// Whether many were lost in the last round.
    loses: bool,
    began: Time,
    /// The most that were under way in the last minute, and when they were.
    ceiling: u32,
    met: Time,
    /// Times since the ceiling rose at which no request came, at the ceiling, for as long as all clients mostly take to ask once.
    standstills: u32,
    last: Time,
    /// Mean time between two arrivals, seconds, and of how many.
    gap: f64,
    gaps: f64,
    /// When requests were answered whose clients have not asked again, the oldest first.
    answered: VecDeque<Time>,
    /// What clients took between an answer and their next request, seconds.
    pauses: Ring<PAUSES>,
    clients: Option<u32>,
    /// Whether answers are told at all.
    told: bool,
}

impl ClosedLoop {
    /// A request came.
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

    /// Requests were answered, or `lost`: that is an answer, too.
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

    /// At the ceiling, nothing came for so long.
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

    /// How many clients there are, if they wait for answers.
    pub fn clients(&self) -> Option<u32> {
        self.clients
    }

    /// Whether answers are told: without them no load looks like a closed loop.
    pub fn is_told(&self) -> bool {
        self.told
    }

    /// What another client takes before it asks again. `hopeful`: as where it has the machine to itself, which clients have beside whom the device waits.
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

    /// There are no more clients than these.
    fn lower(&mut self, ceiling: u32, now: Time) {
        if ceiling < self.ceiling {
            (self.ceiling, self.met, self.standstills) = (ceiling, now, 0);
            self.forget_clients(ceiling.saturating_sub(self.under_way));
        }
    }

    /// Keeps so many of those that were answered, the last: the others have left.
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

    /// What a device of batches of half of what is under way makes of `clients`, and of requests that come by chance.
    fn judged(clients: Option<u32>) -> Option<u32> {
        let (mut judged, mut random) = (ClosedLoop::default(), Random(7));
        let (mut now, mut arrivals, mut waiting) = (0, 0, 0);
        while arrivals < 4_096 {
            now += 1_000_000;
            judged.answered(at(now), waiting, false);
            let coming = match clients {
                Some(clients) if arrivals == 0 => clients,
                Some(_) => waiting,
                // As many in the mean, but more or fewer of them.
                None => (0..64).filter(|_| random.even() < 0.25).count() as u32,
            };
            (0..coming).for_each(|i| judged.arrived(at(now + 1_000 * u64::from(i))));
            arrivals += coming;
            waiting = judged.under_way.div_ceil(2);
        }
        judged.clients()
    }

    #[test]
    fn clients_that_wait_for_answers_are_told_from_requests_that_come_by_chance() {
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

    /// The device answers at once for `circles` ms, in each of which all clients ask, and then `stands` still for 20 ms.
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

    /// Twenty at once every 40 ms, which take 10 ms, and now and then 70: the next come all the same.
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

    /// 200 of 256 clients leave, and the others are busy with themselves: after a minute they are all that there are.
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
