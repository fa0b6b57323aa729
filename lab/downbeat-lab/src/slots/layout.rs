//! The search for the sizes of slots with which a cluster serves the highest load.

use std::collections::BTreeMap;
use std::fmt;

use downbeat_core::{Duration, LatencyProfile};

use downbeat_plan::fluid_need;

use super::share_out::{Shares, share_out};

/// A model that runs on slots.
#[derive(Clone, PartialEq, Debug)]
pub struct SlotModel {
    /// Requests per second, in proportion to the other models' rates.
    pub rate: f64,
    /// The time from a request's arrival to its deadline.
    pub slo: Duration,
    /// `l(b)` on a slot of 1, 2, ... steps.
    pub profiles: Vec<LatencyProfile>,
}

/// Equal devices, in steps of their grain, and the models that run on their slots.
#[derive(Clone, PartialEq, Debug)]
pub struct SlotProblem {
    /// The models.
    pub models: Vec<SlotModel>,
    /// Devices.
    pub devices: u32,
    /// Steps of a whole device.
    pub steps: u32,
    /// The most slots of a device.
    pub most_slots: u32,
    /// Whether all devices must be cut alike, as a server's are.
    pub alike: bool,
}

/// The slots of each device, in steps, the largest first. Devices with equal slots stand together.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SlotLayout(pub Vec<Vec<u32>>);

/// A layout, and the load that it holds.
#[derive(Clone, PartialEq, Debug)]
pub struct SlotPlan {
    /// The slots.
    pub layout: SlotLayout,
    /// The multiple of all rates that can be served, if requests come evenly.
    pub factor: f64,
    /// By model, by steps of a slot less one: the slots of that size that the model keeps busy at
    /// that factor.
    pub busy: Vec<Vec<f64>>,
    /// By model, by steps of a slot less one: the cost of a request a second at the prices of
    /// slots, over the model's least cost. The value is infinite where no such slot exists or the
    /// model misses its SLO.
    pub dearness: Vec<Vec<f64>>,
}

/// Up to this many layouts are all evaluated.
const MOST_LAYOUTS: u64 = 2_000;
/// A layout is better if it holds this many times as much. A smaller gain is not worth another cut.
const BETTER: f64 = 1.001;
/// A search begins at this many layouts.
const STARTS: usize = 6;

impl SlotLayout {
    /// Returns the layout of whole devices.
    pub fn whole(problem: &SlotProblem) -> Self {
        SlotLayout(vec![vec![problem.steps]; problem.devices as usize])
    }

    /// Returns whether all devices are cut alike.
    pub fn is_alike(&self) -> bool {
        self.0.windows(2).all(|two| two[0] == two[1])
    }

    fn new(mut devices: Vec<Vec<u32>>) -> Self {
        devices.sort_unstable_by(|a, b| b.cmp(a));
        SlotLayout(devices)
    }

    /// By steps less one: the number of slots of that size.
    fn counts(&self, steps: u32) -> Vec<u32> {
        let mut counts = vec![0; steps as usize];
        self.0.iter().flatten().for_each(|slot| counts[*slot as usize - 1] += 1);
        counts
    }

    /// Returns this layout with one device's slots changed.
    fn with(&self, device: usize, slots: &[u32]) -> Self {
        let mut devices = self.0.clone();
        devices[device] = slots.to_vec();
        SlotLayout::new(devices)
    }
}

/// Writes `2 x 5+5, 10`: numbers of devices, and the steps of their slots.
impl fmt::Display for SlotLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, devices) in self.0.chunk_by(|a, b| a == b).enumerate() {
            let slots: Vec<String> = devices[0].iter().map(u32::to_string).collect();
            let many = if devices.len() > 1 { format!("{} x ", devices.len()) } else { String::new() };
            write!(f, "{}{many}{}", if index > 0 { ", " } else { "" }, slots.join("+"))?;
        }
        Ok(())
    }
}

impl SlotProblem {
    /// Finds the layout that holds the highest multiple of all rates by [`Self::evaluate`]. Up to
    /// 2,000 layouts are all evaluated; beyond that [`Self::search`] decides. Of layouts within
    /// 0.1% the first one counts, and whole devices come first. If devices must be
    /// [`alike`](Self::alike), only such layouts are tried. `None` if no layout meets every SLO.
    pub fn choose(&self) -> Option<SlotPlan> {
        let cuts = self.cuts();
        if !self.alike && layouts(cuts.len() as u64, self.devices) > MOST_LAYOUTS {
            return self.search();
        }
        let mut known = BTreeMap::new();
        let mut all = Vec::new();
        match self.alike {
            true => all.extend(cuts.into_iter().map(|cut| vec![cut; self.devices as usize])),
            false => every_layout(&cuts, self.devices as usize, &mut Vec::new(), &mut all),
        }
        let mut best = (0.0, SlotLayout::whole(self));
        for layout in std::iter::once(best.1.clone()).chain(all.into_iter().map(SlotLayout::new)) {
            let factor = self.factor(&layout, &mut known);
            if factor > best.0 * BETTER {
                best = (factor, layout);
            }
        }
        self.evaluate(&best.1)
    }

    /// Starts from the best few layouts of equal devices and changes one device at a time. Returns
    /// a plan like [`Self::choose`], for any number of layouts.
    pub fn search(&self) -> Option<SlotPlan> {
        let cuts = self.cuts();
        let mut known = BTreeMap::new();
        let whole = SlotLayout::whole(self);
        let mut best = (self.factor(&whole, &mut known), whole);
        let mut uniform: Vec<(f64, SlotLayout)> = Vec::new();
        for cut in &cuts {
            let layout = SlotLayout(vec![cut.clone(); self.devices as usize]);
            uniform.push((self.factor(&layout, &mut known), layout));
        }
        uniform.sort_by(|a, b| b.0.total_cmp(&a.0));
        for start in uniform.into_iter().take(STARTS) {
            let found = self.climb(start, &cuts, &mut known);
            if found.0 > best.0 * BETTER {
                best = found;
            }
        }
        self.evaluate(&best.1)
    }

    /// Changes one device at a time, the best change first, until none is better.
    fn climb(
        &self,
        start: (f64, SlotLayout),
        cuts: &[Vec<u32>],
        known: &mut BTreeMap<Vec<u32>, f64>,
    ) -> (f64, SlotLayout) {
        let mut at = start;
        loop {
            let mut next = at.clone();
            for device in 0..at.1.0.len() {
                // Of equal devices the first stands for all.
                if device > 0 && at.1.0[device] == at.1.0[device - 1] {
                    continue;
                }
                for cut in cuts {
                    let layout = at.1.with(device, cut);
                    let factor = self.factor(&layout, known);
                    if factor > next.0 {
                        next = (factor, layout);
                    }
                }
            }
            if next.0 <= at.0 * BETTER {
                return at;
            }
            at = next;
        }
    }

    /// Returns all ways to cut a device into slots on which some model meets its SLO, the whole
    /// device first.
    fn cuts(&self) -> Vec<Vec<u32>> {
        let usable = |steps: &u32| {
            let of =
                |model: &SlotModel| model.profiles.get(*steps as usize - 1).is_some_and(|p| p.latency(1) <= model.slo);
            self.models.iter().any(of)
        };
        let sizes: Vec<u32> = (1..=self.steps).rev().filter(|steps| *steps == self.steps || usable(steps)).collect();
        let mut cuts = Vec::new();
        cut(&sizes, self.steps, self.most_slots, &mut Vec::new(), &mut cuts);
        cuts
    }

    fn factor(&self, layout: &SlotLayout, known: &mut BTreeMap<Vec<u32>, f64>) -> f64 {
        let counts = layout.counts(self.steps);
        // The factor does not depend on the device of a slot.
        *known.entry(counts).or_insert_with_key(|counts| self.shares(counts).map_or(0.0, |(shares, _)| shares.factor))
    }

    /// Finds the highest multiple of all rates for which every model can have enough of the slots.
    /// Batches gather and run within each SLO at that rate ([`fluid_need`]). `None` if some model
    /// meets its SLO on no slot.
    pub fn evaluate(&self, layout: &SlotLayout) -> Option<SlotPlan> {
        let (Shares { factor, slots, prices }, costs) = self.shares(&layout.counts(self.steps))?;
        let dearness = costs.iter().map(|costs| {
            let paid: Vec<f64> = costs.iter().zip(&prices).map(|(cost, price)| cost * price.max(1e-9)).collect();
            let least = paid.iter().copied().fold(f64::INFINITY, f64::min);
            paid.into_iter().map(|paid| paid / least).collect()
        });
        Some(SlotPlan { layout: layout.clone(), factor, busy: slots, dearness: dearness.collect() })
    }

    /// Returns the shares, with the costs by model and steps.
    fn shares(&self, counts: &[u32]) -> Option<(Shares, Vec<Vec<f64>>)> {
        let rates: Vec<f64> = self.models.iter().map(|model| model.rate).collect();
        let mut factor = 1e9;
        // Higher rates allow larger batches, which cost less. From above, this falls to the highest
        // factor that holds itself.
        loop {
            let costs: Vec<Vec<f64>> = self.models.iter().map(|model| model.costs(factor, counts)).collect();
            let shares = share_out(&rates, &costs, counts)?;
            if shares.factor >= factor * (1.0 - 1e-6) {
                return Some((shares, costs));
            }
            factor = shares.factor;
        }
    }
}

impl SlotModel {
    /// By steps less one: the slots that a request a second keeps busy when requests come at
    /// `factor` times the rate.
    fn costs(&self, factor: f64, counts: &[u32]) -> Vec<f64> {
        let rate = self.rate * factor;
        let cost = |(profile, count): (&LatencyProfile, &u32)| match count {
            0 => f64::INFINITY,
            _ => fluid_need(rate, profile, self.slo).map_or(f64::INFINITY, |need| need.devices / rate),
        };
        self.profiles.iter().zip(counts).map(cost).collect()
    }
}

/// Returns the number of layouts: multisets of as many cuts as there are devices.
fn layouts(cuts: u64, devices: u32) -> u64 {
    (1..=u64::from(devices)).fold(1, |all, n| if all > MOST_LAYOUTS { all } else { all * (cuts + n - 1) / n })
}

fn cut(sizes: &[u32], left: u32, most: u32, slots: &mut Vec<u32>, cuts: &mut Vec<Vec<u32>>) {
    if left == 0 {
        cuts.push(slots.clone());
    } else if most > 0 {
        for (index, size) in sizes.iter().enumerate().filter(|(_, size)| **size <= left) {
            slots.push(*size);
            cut(&sizes[index..], left - size, most - 1, slots, cuts);
            slots.pop();
        }
    }
}

fn every_layout(cuts: &[Vec<u32>], devices: usize, layout: &mut Vec<Vec<u32>>, all: &mut Vec<Vec<Vec<u32>>>) {
    if layout.len() == devices {
        all.push(layout.clone());
        return;
    }
    for (index, cut) in cuts.iter().enumerate() {
        layout.push(cut.clone());
        every_layout(&cuts[index..], devices, layout, all);
        layout.pop();
    }
}
