//! A moving average: the newest value counts most, and older values count less and less.

/// An exponentially weighted moving average (GSLICE algorithm 1).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Average {
    weight: f64,
    value: Option<f64>,
}

impl Average {
    /// An average without numbers. Each new number has this weight, from 0 to 1, and all earlier
    /// ones the rest.
    pub fn new(weight: f64) -> Self {
        Average { weight: weight.clamp(0.0, 1.0), value: None }
    }

    /// Adds a number. NaN and infinity are left out.
    pub fn add(&mut self, number: f64) {
        if number.is_finite() {
            let value = self.value.map_or(number, |value| value + self.weight * (number - value));
            self.value = Some(value);
        }
    }

    /// Forgets all numbers.
    pub fn forget(&mut self) {
        self.value = None;
    }

    /// The average; `None`: there is no number.
    pub fn value(&self) -> Option<f64> {
        self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_taken_whole_and_later_ones_by_their_weight() {
        let mut average = Average::new(0.25);
        assert_eq!(average.value(), None);
        average.add(8.0);
        average.add(f64::NAN);
        assert_eq!(average.value(), Some(8.0));
        average.add(16.0);
        assert_eq!(average.value(), Some(10.0));
        average.forget();
        assert_eq!(average.value(), None);
    }
}
