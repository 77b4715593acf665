// Sort and filter the table of all heads.
(() => {
  const box = document.querySelector('.atlas'); if (!box) return;
  const body = box.querySelector('tbody'), rows = [...body.rows];
  const text = box.querySelector('input'), kind = box.querySelector('select'), shown = box.querySelector('output');
  const value = (row, i) => { const cell = row.cells[i]; return cell.dataset.value === undefined ? cell.textContent : +cell.dataset.value; };
  const filter = () => {
    const wanted = text.value.trim().toLowerCase(); let count = 0;
    for (const row of rows) {
      const ok = (!wanted || row.textContent.toLowerCase().includes(wanted)) && (!kind.value || row.dataset.verdict === kind.value);
      row.hidden = !ok; count += ok;
    }
    shown.textContent = count + ' of ' + rows.length + ' heads';
  };
  box.querySelectorAll('th button').forEach((button, i) => button.addEventListener('click', () => {
    const column = button.parentElement, up = column.getAttribute('aria-sort') === 'descending';
    box.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'));
    column.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    rows.sort((a, b) => { const x = value(a, i), y = value(b, i); return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1); });
    body.append(...rows);
  }));
  text.addEventListener('input', filter); kind.addEventListener('change', filter); filter();
})();
